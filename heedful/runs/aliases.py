"""Foreign names: the names of settings, flags and tasks in other libraries, with Heedful's names for them.

A foreign name is accepted only if its value means the same in Heedful; the command then prints Heedful's name once.
All other foreign names are refused, because an unchanged value would silently change a run. The error names Heedful's
setting and says how to convert the value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from heedful.errors import HeedfulError, did_you_mean
from heedful.tasks.specs import SPECS, task_names


class ForeignName(NamedTuple):
    """A name in other libraries, with its meaning in Heedful.

    Args:
        name: The setting or flag of the other library, with underscores.
        meant: Full paths of Heedful's settings; the first path that a command knows is used. If no setting has this
            meaning, a single flag ("--output"), argument ("DATA") or command ("heedful push").
        advice: How to convert the value. "" if the value need not be converted; only then the name is accepted.
    """

    name: str
    meant: tuple[str, ...]
    advice: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the name may be used with an unchanged value."""
        return not self.advice

    @property
    def is_setting(self) -> bool:
        """Whether the name means a setting instead of a flag, an argument or a command."""
        return not self.meant[0].startswith(("--", "DATA", "heedful "))

    def path(self, known: Mapping[str, object]) -> str:
        """Return the full path of the setting, or "" if the command does not have it.

        Args:
            known: The settings of the command, by full path.
        """
        for path in self.meant:
            for full_path in (path, f"pretrain.{path}"):  # distilling a masked LM nests the settings of pretraining
                if full_path in known:
                    return full_path
        return ""


LR = "train.optimizer.lr"
WEIGHT_DECAY = "train.optimizer.weight_decay"
MICROBATCH = "train.max_tokens_per_microbatch"
WARMUP_RATIO = "train.schedule.warmup_ratio"
EVAL_EVERY = ("eval_every_steps", "fit.eval_every_epochs")
INIT_MODEL = ("init.model", "model.init_from")
MAX_LENGTH = ("max_length", "max_seq_length")
PRECISION_ADVICE = "set precision=bfloat16, float32 or auto; float16 is for GPUs"
ACCUMULATION_ADVICE = (
    "batch_size is the batch of an update; max_tokens_per_microbatch splits the batch into micro-batches without "
    "changing the result"
)
DATA_ADVICE = "give files as arguments: train=FILE dev=FILE test=FILE"
RESUME_ADVICE = "give the same command again: a run that was interrupted resumes"
WARMUP_ADVICE = "give a share of the training: warm-up steps divided by all steps"

_SAME_MEANING: tuple[tuple[tuple[str, ...], str], ...] = (
    # (`ForeignName.meant`, foreign names with the same meaning, separated by spaces)
    ((LR,), "learning_rate lr0 body_learning_rate learning_rate_init initial_rate peak_lr"),
    ((WEIGHT_DECAY,), "l2_weight_decay"),
    (("train.optimizer.max_grad_norm",), "gradient_clip_val grad_clip clip_grad_norm max_gradient_norm clip_norm"),
    (("train.optimizer.eps",), "adam_epsilon epsilon optimizer_eps"),
    (("train.optimizer.layer_decay",), "layerwise_lr_decay llrd lr_layer_decay"),
    (("train.epochs",), "num_train_epochs max_epochs num_epochs n_epochs"),
    (("train.max_steps",), "num_train_steps num_training_steps total_steps train_steps"),
    (("train.batch_size",), "batch train_batch_size"),
    ((WARMUP_RATIO,), "warmup_proportion warmup_fraction"),
    (("train.schedule.min_lr_ratio",), "lrf min_lr_rate"),
    (("train.schedule.kind",), "lr_scheduler_type lr_scheduler scheduler"),
    (("train.gradient_checkpointing",), "activation_checkpointing use_gradient_checkpointing"),
    (("train.shrink_batch_on_oom",), "auto_find_batch_size"),
    (("train.compile",), "torch_compile"),
    (("train.freeze_layers",), "freeze num_frozen_layers"),
    (("train.seed",), "random_state random_seed manual_seed"),
    (("data.seed",), "split_seed"),
    (("fit.patience",), "early_stopping_patience"),
    (("fit.eval_every_epochs",), "check_val_every_n_epoch"),
    (("fit.keep_last",), "save_total_limit"),
    (("fit.load_best_at_end",), "load_best_model_at_end"),
    (("data.dev_fraction", "eval_fraction"), "validation_fraction val_fraction validation_split dev_split"),
    (MAX_LENGTH, "model_max_length max_sequence_length max_len max_seq_length"),
    (("max_seq_length",), "block_size seq_length"),
    (("task.num_beams",), "generation_num_beams beam_size"),
    (("task.label_smoothing",), "label_smoothing_factor"),
    (("task.max_answer_tokens",), "max_answer_length max_answer_len"),
    (("task.no_answer_threshold",), "null_score_diff_threshold"),
    (("objective.mask_prob",), "mlm_probability masked_lm_prob mlm_prob noise_density"),
    (("objective.short_seq_prob",), "short_seq_probability"),
    (("objective.num_static_masks",), "dupe_factor"),
    (("objective.mean_noise_span_length",), "mean_noise_span"),
    (("objective.disc_weight",), "discriminator_weight rtd_loss_weight"),
    (INIT_MODEL, "model_name_or_path model_name pretrained_model_name_or_path base_model model_id"),
    (("init.revision",), "model_revision"),
    (("teacher", "objective.teacher"), "teacher_model teacher_name_or_path teacher_model_name_or_path"),
    (("tokenizer.path",), "tokenizer_name tokenizer_name_or_path tokenizer_path"),
    (("tokenizer.vocab_size", "vocab_size"), "vocabulary_size voc_size n_vocab"),
    (("tokenizer.algorithm", "algorithm"), "tokenizer_type tokenizer_model"),
    (("tokenizer.min_frequency", "min_frequency"), "min_freq"),
    (("tokenizer.lower_case", "lower_case"), "do_lower_case lowercase"),
    (("tokenizer.num_sentinels", "num_sentinels"), "extra_ids num_extra_ids"),
    (("--output",), "output_dir output_path out_dir save_dir default_root_dir"),
    (("--overwrite",), "overwrite_output_dir"),
    (("--track",), "report_to"),
    (("--nproc",), "nproc_per_node num_processes"),
)
_OTHER_MEANING: tuple[tuple[tuple[str, ...], str, str], ...] = (
    # (`ForeignName.meant`, foreign names with another meaning, separated by spaces, `ForeignName.advice`)
    (
        ("train.batch_size",),
        "per_device_train_batch_size per_gpu_train_batch_size",
        "batch_size counts the samples of an update over all devices: multiply by the number of devices and by "
        "gradient_accumulation_steps",
    ),
    (
        (MICROBATCH,),
        "per_device_eval_batch_size eval_batch_size mini_batch_size",
        "memory is bounded in tokens, not in samples",
    ),
    (
        (MICROBATCH,),
        "gradient_accumulation_steps accumulate_grad_batches accumulate_gradient grad_accum_steps",
        ACCUMULATION_ADVICE,
    ),
    (
        ("train.seed",),
        "data_seed",
        "the sample order is seeded by train.seed; data.seed chooses the dev split",
    ),
    (
        ("max_length",),
        "max_source_length max_target_length",
        'max_length limits texts and targets alike; longer ones are cut with long_inputs="truncate". To limit the '
        "texts that evaluations generate, set task.max_new_tokens",
    ),
    (
        ("task.max_new_tokens",),
        "generation_max_length",
        "max_new_tokens counts generated tokens only: subtract the tokens of the prompt, or the decoder's start token "
        "of an encoder-decoder model",
    ),
    ((WARMUP_RATIO,), "warmup_steps num_warmup_steps warmup", WARMUP_ADVICE),
    ((WARMUP_RATIO,), "warmup_epochs", "give a share of the training: warm-up epochs divided by all epochs"),
    ((WEIGHT_DECAY,), "l2", "weight decay is decoupled from the gradient here, so it needs another value than L2"),
    (
        ("loss.kd_weight", WEIGHT_DECAY),
        "alpha",
        "loss.kd_weight weights the teacher's outputs in distillation; weight decay is decoupled from the gradient, "
        "unlike L2",
    ),
    (("train.optimizer.betas",), "adam_beta1 adam_beta2 beta_1 beta_2 momentum", "give both, as betas=[0.9, 0.999]"),
    (("train.optimizer.kind",), "optim optimizer_name solver", "AdamW is the only optimizer"),
    (("train.schedule.kind",), "cos_lr", 'set schedule.kind="cosine"'),
    (("train.epochs",), "max_iter", "give passes over the training data, or the number of updates in max_steps"),
    (("train.time_budget",), "max_time time max_train_time", "give a duration, as 90s, 10m or 2h"),
    (("train.precision",), "fp16 bf16 half amp use_amp mixed_precision tf32 torch_dtype dtype", PRECISION_ADVICE),
    (("train.device",), "use_cpu no_cuda accelerator gpu_id use_cuda", "set device=cpu, device=cuda or device=auto"),
    (("--nproc",), "devices gpus num_gpus", "give the number of processes, one for each device, or gpu"),
    (
        ("train.data_parallel_shard_degree",),
        "fsdp sharding_strategy zero_stage deepspeed",
        "give the number of ranks that share one copy of the training state, or all",
    ),
    (("train.ema_decay",), "ema use_ema", "give the decay per step, as 0.999; 0 turns averaging off"),
    (
        EVAL_EVERY,
        "eval_steps eval_strategy evaluation_strategy eval_frequency val_check_interval val_every",
        "give steps in eval_every_steps of pretrain, and epochs, or parts of one, in fit.eval_every_epochs elsewhere",
    ),
    (
        ("fit.patience",),
        "early_stopping n_iter_no_change early_stop",
        "give the number of evaluations without a better metric; 0 turns early stopping off",
    ),
    (
        ("fit.checkpoint_every_minutes",),
        "save_steps save_strategy save_every_n_epochs every_n_train_steps save_period",
        "checkpoints are written by time, and after each evaluation",
    ),
    (("fit.keep_last",), "save_top_k", "keep_last counts the newest checkpoints; the best checkpoint is kept too"),
    (
        ("task.metric",),
        "metric_for_best_model monitor eval_metric",
        "models are ranked by the main metric of their task; only seq2seq and rank have a choice of metrics",
    ),
    (
        ("tokenizer.limit_alphabet", "limit_alphabet"),
        "character_coverage initial_alphabet",
        "give the number of characters of the vocabulary, the most frequent ones",
    ),
    (("long_inputs",), "doc_stride truncation stride", 'set long_inputs="stride" or "truncate"'),
    (("task.thresholds",), "threshold decision_threshold", "set thresholds=0.5, or tuned on dev"),
    (("objective.mask_unit",), "whole_word_mask wwm do_whole_word_mask", "set mask_unit=words"),
    (
        ("data.columns",),
        "text_column_name label_column_name label_column sentence1_key column_mapping",
        "set columns.text=NAME and columns.label=NAME",
    ),
    (
        ("data.dev_fraction", "eval_fraction"),
        "validation_split_percentage test_size val_size",
        "give a share from 0 to 1",
    ),
    (("DATA",), "train_file validation_file test_file dataset_name data_path train_data_file", DATA_ADVICE),
    (("--output",), "project run_name", "give the run folder"),
    (("--overwrite",), "exist_ok force", "--overwrite moves an existing run folder aside"),
    (("--output",), "resume resume_from_checkpoint ckpt_path resume_from", RESUME_ADVICE),
    (("--track",), "logger loggers logging_steps", "the journal has every step; trackers are csv, tensorboard, ..."),
    (("heedful push",), "push_to_hub hub_model_id hub_token", "give the run folder and the name on the hub"),
    (("--dry-run",), "fast_dev_run overfit_batches", "--dry-run estimates time and memory and trains nothing"),
)


def _foreign_names() -> Iterator[ForeignName]:
    for meant, names in _SAME_MEANING:
        yield from (ForeignName(name, meant) for name in names.split())
    for meant, names, advice in _OTHER_MEANING:
        yield from (ForeignName(name, meant, advice) for name in names.split())


ALIASES: dict[str, ForeignName] = {alias.name: alias for alias in _foreign_names()}

_COMMANDS_BY_TASK: dict[str, str] = {  # commands for tasks of other libraries that `heedful finetune` does not have
    "fill-mask": "heedful pretrain --objective mlm",
    "masked-lm": "heedful pretrain --objective mlm",
    "language-modeling": "heedful pretrain --objective mlm, or clm",
    "text-generation": "heedful pretrain --objective clm",
    "causal-lm": "heedful pretrain --objective clm",
    "zero-shot-classification": 'heedful predict MODEL TEXT --candidate-labels "a, b"',
    "next-sentence-prediction": "heedful pretrain --objective mlm+nsp",
}


def task_aliases() -> dict[str, str]:
    """Return the public task name of each alias. Aliases are names of Hugging Face's pipelines and other libraries."""
    return {alias: spec.public_name for spec in SPECS.values() for alias in spec.aliases}


def canonical_task(task: str) -> str:
    """Return the public name of a task that is given by its name or an alias: "tag" for "tag" and for "ner".

    Raises:
        HeedfulError: If no task has this name or alias.
    """
    name = task.strip().lower().replace("_", "-")
    known, aliases = task_names(), task_aliases()
    if task in known:
        return task
    for candidate in (name, aliases.get(name, ""), aliases.get(task, "")):
        if candidate in known:
            return candidate
    if name in _COMMANDS_BY_TASK:
        raise HeedfulError(f'"{task}" is not a task of finetune: use {_COMMANDS_BY_TASK[name]}')
    close = did_you_mean(name, [*known, *aliases])
    raise HeedfulError(f'"{task}" is not a task{close}: use one of {", ".join(known)}')
