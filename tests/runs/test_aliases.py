"""Names of settings in other libraries: accepted if the value means the same, else refused with Heedful's name."""

from __future__ import annotations

from typing import Any

import pytest

from heedful.cli.verb_group import NAMES
from heedful.errors import HeedfulError, SettingError
from heedful.runs.aliases import ALIASES, task_aliases
from heedful.runs.distil.settings import DistilSettings, MaskedDistilSettings
from heedful.runs.finetune.settings import FinetuneSettings, check_task, finetune_defaults
from heedful.runs.overrides import Overrides
from heedful.runs.pretrain.settings import PretrainSettings, pretrain_defaults
from heedful.runs.settings_schema import setting_paths
from heedful.tasks.specs import task_names
from heedful.tokenizer.settings import TokenizerSettings

CLASSIFY, _ = finetune_defaults("classify", 600, random_init=False)
PRETRAIN = pretrain_defaults("mlm", 256, continued=False)
ACCEPTED = [  # (library, its name of a setting, a value, full path in Heedful's settings of fine-tuning)
    ("transformers", "learning_rate", 0.5, "train.optimizer.lr"),
    ("transformers", "weight_decay", 0.5, "train.optimizer.weight_decay"),
    ("transformers", "adam_epsilon", 0.5, "train.optimizer.eps"),
    ("transformers", "max_grad_norm", 0.5, "train.optimizer.max_grad_norm"),
    ("transformers", "lr_scheduler_type", "cosine", "train.schedule.kind"),
    ("transformers", "warmup_ratio", 0.5, "train.schedule.warmup_ratio"),
    ("transformers", "gradient_checkpointing", True, "train.gradient_checkpointing"),
    ("transformers", "auto_find_batch_size", True, "train.shrink_batch_on_oom"),
    ("transformers", "torch_compile", True, "train.compile"),
    ("transformers", "early_stopping_patience", 3, "fit.patience"),
    ("transformers", "save_total_limit", 3, "fit.keep_last"),
    ("transformers", "load_best_model_at_end", False, "fit.load_best_at_end"),
    ("transformers", "num_train_epochs", 3.0, "train.epochs"),
    ("transformers", "max_steps", 7, "train.max_steps"),
    ("Lightning", "max_epochs", 3.0, "train.epochs"),
    ("setfit", "num_epochs", 3.0, "train.epochs"),
    ("bert", "num_train_steps", 7, "train.max_steps"),
    ("transformers", "model_name_or_path", "m", "init.model"),
    ("transformers", "model_revision", "a", "init.revision"),
    ("transformers", "max_seq_length", 64, "max_length"),
    ("tokenizers", "model_max_length", 64, "max_length"),
    ("fairseq", "clip_norm", 0.5, "train.optimizer.max_grad_norm"),
    ("sentence-transformers", "batch_size", 7, "train.batch_size"),
    ("sentence-transformers", "train_batch_size", 7, "train.batch_size"),
    ("setfit", "body_learning_rate", 0.5, "train.optimizer.lr"),
    ("setfit", "warmup_proportion", 0.5, "train.schedule.warmup_ratio"),
    ("spaCy", "initial_rate", 0.5, "train.optimizer.lr"),
    ("spaCy", "grad_clip", 0.5, "train.optimizer.max_grad_norm"),
    ("spaCy", "patience", 3, "fit.patience"),
    ("ultralytics", "lr0", 0.5, "train.optimizer.lr"),
    ("ultralytics", "batch", 7, "train.batch_size"),
    ("Lightning", "gradient_clip_val", 0.5, "train.optimizer.max_grad_norm"),
    ("Lightning", "check_val_every_n_epoch", 2.0, "fit.eval_every_epochs"),
    ("Lightning", "precision", "float32", "train.precision"),
    ("scikit-learn", "learning_rate_init", 0.5, "train.optimizer.lr"),
    ("scikit-learn", "random_state", 7, "train.seed"),
    ("scikit-learn", "validation_fraction", 0.5, "data.dev_fraction"),
    ("timm", "layer_decay", 0.5, "train.optimizer.layer_decay"),
    ("modernbert", "llrd", 0.5, "train.optimizer.layer_decay"),
]
ACCEPTED_IN_PRETRAINING = [  # the same, with full paths in Heedful's settings of pre-training
    ("transformers", "mlm_probability", 0.5, "objective.mask_prob"),
    ("bert", "masked_lm_prob", 0.5, "objective.mask_prob"),
    ("XLM", "mlm_prob", 0.5, "objective.mask_prob"),
    ("bert", "dupe_factor", 3, "objective.num_static_masks"),
    ("transformers", "block_size", 64, "max_seq_length"),
    ("transformers", "tokenizer_name", "t", "tokenizer.path"),
    ("transformers", "do_lower_case", True, "tokenizer.lower_case"),
    ("transformers", "extra_ids", 7, "tokenizer.num_sentinels"),
    ("sentencepiece", "vocabulary_size", 70, "tokenizer.vocab_size"),
    ("torchtext", "min_freq", 3, "tokenizer.min_frequency"),
    ("transformers", "model_name_or_path", "m", "model.init_from"),
    ("scikit-learn", "validation_fraction", 0.5, "eval_fraction"),
]
REFUSED = [  # (library, its name of a setting, Heedful's setting, flag, argument or command that the error names)
    ("transformers", "per_device_train_batch_size", "train.batch_size"),
    ("transformers", "per_device_eval_batch_size", "train.max_tokens_per_microbatch"),
    ("transformers", "data_seed", "train.seed"),
    ("transformers", "max_source_length", "max_length"),
    ("transformers", "max_target_length", "max_length"),
    ("transformers", "generation_max_length", "task.max_new_tokens"),
    ("transformers", "gradient_accumulation_steps", "train.max_tokens_per_microbatch"),
    ("transformers", "warmup_steps", "train.schedule.warmup_ratio"),
    ("transformers", "fp16", "train.precision"),
    ("transformers", "bf16", "train.precision"),
    ("transformers", "tf32", "train.precision"),
    ("transformers", "torch_dtype", "train.precision"),
    ("transformers", "use_cpu", "train.device"),
    ("transformers", "no_cuda", "train.device"),
    ("transformers", "eval_steps", "fit.eval_every_epochs"),
    ("transformers", "eval_strategy", "fit.eval_every_epochs"),
    ("transformers", "save_steps", "fit.checkpoint_every_minutes"),
    ("transformers", "save_strategy", "fit.checkpoint_every_minutes"),
    ("transformers", "metric_for_best_model", "task.metric"),
    ("transformers", "adam_beta1", "train.optimizer.betas"),
    ("transformers", "optim", "train.optimizer.kind"),
    ("transformers", "fsdp", "train.data_parallel_shard_degree"),
    ("transformers", "doc_stride", "long_inputs"),
    ("transformers", "text_column_name", "data.columns"),
    ("transformers", "validation_split_percentage", "data.dev_fraction"),
    ("transformers", "output_dir", "--output"),
    ("transformers", "report_to", "--track"),
    ("transformers", "logging_steps", "--track"),
    ("transformers", "train_file", "DATA"),
    ("transformers", "resume_from_checkpoint", "--output"),
    ("transformers", "push_to_hub", "heedful push"),
    ("transformers", "overwrite_output_dir", "--overwrite"),
    ("sentence-transformers", "use_amp", "train.precision"),
    ("sentence-transformers", "mini_batch_size", "train.max_tokens_per_microbatch"),
    ("sentence-transformers", "output_path", "--output"),
    ("spaCy", "accumulate_gradient", "train.max_tokens_per_microbatch"),
    ("spaCy", "eval_frequency", "fit.eval_every_epochs"),
    ("spaCy", "gpu_id", "train.device"),
    ("ultralytics", "warmup_epochs", "train.schedule.warmup_ratio"),
    ("ultralytics", "amp", "train.precision"),
    ("ultralytics", "half", "train.precision"),
    ("ultralytics", "cos_lr", "train.schedule.kind"),
    ("ultralytics", "time", "train.time_budget"),
    ("ultralytics", "momentum", "train.optimizer.betas"),
    ("ultralytics", "project", "--output"),
    ("ultralytics", "exist_ok", "--overwrite"),
    ("ultralytics", "save_period", "fit.checkpoint_every_minutes"),
    ("Lightning", "max_time", "train.time_budget"),
    ("Lightning", "accumulate_grad_batches", "train.max_tokens_per_microbatch"),
    ("Lightning", "accelerator", "train.device"),
    ("Lightning", "devices", "--nproc"),
    ("Lightning", "val_check_interval", "fit.eval_every_epochs"),
    ("Lightning", "default_root_dir", "--output"),
    ("Lightning", "fast_dev_run", "--dry-run"),
    ("Lightning", "monitor", "task.metric"),
    ("Lightning", "save_top_k", "fit.keep_last"),
    ("Lightning", "ckpt_path", "--output"),
    ("Lightning", "logger", "--track"),
    ("scikit-learn", "alpha", "train.optimizer.weight_decay"),
    ("scikit-learn", "max_iter", "train.epochs"),
    ("scikit-learn", "early_stopping", "fit.patience"),
    ("scikit-learn", "n_iter_no_change", "fit.patience"),
    ("scikit-learn", "solver", "train.optimizer.kind"),
    ("scikit-learn", "test_size", "data.dev_fraction"),
]


def test_the_table_has_at_least_80_names_of_seven_libraries() -> None:
    tested = [(library, name) for table in (ACCEPTED, ACCEPTED_IN_PRETRAINING, REFUSED) for library, name, *_ in table]
    libraries = {library for library, _ in tested}
    assert len({name for _, name in tested}) >= 80
    assert libraries >= {
        *("transformers", "sentence-transformers", "setfit", "spaCy", "ultralytics", "Lightning", "scikit-learn")
    }


@pytest.mark.parametrize(
    ("defaults", "name", "value", "path"),
    [
        *((CLASSIFY, name, value, path) for _, name, value, path in ACCEPTED),
        *((PRETRAIN, name, value, path) for _, name, value, path in ACCEPTED_IN_PRETRAINING),
    ],
)
def test_a_foreign_name_of_the_same_meaning_is_accepted(defaults: Any, name: str, value: Any, path: str) -> None:
    overrides = Overrides(values={name: value})
    resolved = overrides.resolve(defaults)
    assert list(resolved.sources) == [path]
    own_name = path.rpartition(".")[2]
    assert resolved.renamed == overrides.renamed == ({} if own_name == name else {name: path})


@pytest.mark.parametrize(("name", "meant"), [(name, meant) for _, name, meant in REFUSED])
@pytest.mark.parametrize("prefix", ["", "train."])
def test_another_foreign_name_is_refused_with_the_right_one(prefix: str, name: str, meant: str) -> None:
    with pytest.raises(SettingError, match="did you mean") as caught:
        Overrides(values={prefix + name: 1}).resolve(CLASSIFY)
    assert caught.value.code == "unknown"
    assert f'"{meant}"' in str(caught.value)


def test_the_error_says_how_to_convert_the_value() -> None:
    with pytest.raises(SettingError, match="divided by all steps"):
        Overrides(values={"warmup_steps": 100}).resolve(CLASSIFY)
    with pytest.raises(SettingError, match="over all devices"):
        Overrides(values={"per_device_train_batch_size": 8}).resolve(CLASSIFY)
    with pytest.raises(SettingError, match=r"sample order is seeded by train\.seed; data\.seed chooses the dev split"):
        Overrides(values={"data_seed": 3}).resolve(CLASSIFY)
    for name in ("max_source_length", "max_target_length"):
        with pytest.raises(SettingError, match="limits texts and targets alike"):
            Overrides(values={name: 64}).resolve(CLASSIFY)
    with pytest.raises(SettingError, match="subtract the tokens of the prompt"):
        Overrides(values={"generation_max_length": 64}).resolve(CLASSIFY)


def test_the_error_for_a_setting_of_another_command_names_that_setting() -> None:
    with pytest.raises(SettingError, match=r"other commands have objective\.mask_prob"):
        Overrides(values={"mlm_probability": 0.2}).resolve(CLASSIFY)


def test_the_setting_or_command_that_a_foreign_name_means_exists() -> None:
    settings_classes = (FinetuneSettings, PretrainSettings, DistilSettings, MaskedDistilSettings, TokenizerSettings)
    known_paths = {path for settings_class in settings_classes for path in setting_paths(settings_class)}
    for foreign_name in ALIASES.values():
        for meant in foreign_name.meant:
            if meant.startswith("heedful "):
                assert meant.removeprefix("heedful ") in NAMES
            elif foreign_name.is_setting:
                assert meant in known_paths, f"{foreign_name.name}: {meant} is not a setting"


def test_no_setting_of_heedful_is_refused_as_a_foreign_name() -> None:
    own_names = {path.rpartition(".")[2] for path in setting_paths(FinetuneSettings)}
    refused_names = {name for name, foreign_name in ALIASES.items() if foreign_name.advice}
    assert not own_names & refused_names


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("ner", "tag"),
        ("token-classification", "tag"),
        ("text-classification", "classify"),
        ("sentiment-analysis", "classify"),
        ("question-answering", "qa"),
        ("summarization", "seq2seq"),
        ("translation", "seq2seq"),
        ("text2text-generation", "seq2seq"),
        ("sentence-similarity", "embed"),
        ("feature-extraction", "embed"),
        ("multiple-choice", "multiple-choice"),
        ("Text_Classification", "classify"),
        ("classify", "classify"),
    ],
)
def test_a_task_may_be_given_by_the_name_of_a_pipeline(name: str, task: str) -> None:
    assert check_task(name) == task


def test_aliases_of_tasks_mean_tasks_and_each_task_has_one() -> None:
    assert {check_task(alias) for alias in task_aliases()} == set(task_names())


@pytest.mark.parametrize("name", ["fill-mask", "text-generation", "zero-shot-classification"])
def test_the_error_for_a_pipeline_that_is_no_task_of_finetune_names_the_command(name: str) -> None:
    with pytest.raises(HeedfulError, match="use heedful"):
        check_task(name)


def test_the_error_for_a_misspelt_pipeline_names_the_right_one() -> None:
    with pytest.raises(HeedfulError, match='did you mean "token-classification"'):
        check_task("token-clasification")
