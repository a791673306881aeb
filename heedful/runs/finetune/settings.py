"""Settings of a fine-tuning run, and their defaults, which depend on the data.

This module imports nothing heavy, so that a wrong setting is refused immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from heedful.data import DataSettings
from heedful.errors import HeedfulError, SettingError
from heedful.runs.aliases import canonical_task
from heedful.runs.finetune.init_settings import ClassicInit, Init, Pretrained, RecurrentInit, Seq2Seq
from heedful.runs.overrides import Overrides, Resolved
from heedful.settings import load_mapping, overlay
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs import SPECS, specs_named
from heedful.tasks.specs.seq2seq import SEQ2SEQ, BleuTokenizer, Seq2SeqSettings, has_bleu
from heedful.train.settings import AdamW, FitSettings, Linear, Noam, Schedule, TrainSettings

PRETRAINED = Pretrained()
LongInputs = Literal["stride", "truncate"]
Method = Literal["auto", "finetune", "linear", "contrastive"]
METHOD_TASKS = ("classify", "multiple")  # kinds of tasks with several methods
MIN_CONTRASTIVE_STEPS = 100
FEW_EXAMPLES = 200  # training examples below which methods are compared
FINETUNE_ONLY = ("train.", "fit.", "init.reinit_layers")  # prefixes of settings that only the method finetune uses
EVERY_METHOD = ("train.seed", "train.device", "train.precision", "fit.keep_checkpoints")  # exceptions to FINETUNE_ONLY
EVALUATION_SETTINGS = ("fit.patience", "fit.load_best_at_end", "fit.eval_every_epochs")  # evaluations during training
CHARS_PER_EXAMPLE = 512  # characters, about 128 tokens, that are equivalent to one example in the choice of epochs
DOCUMENTS_PER_BATCH = 64  # approximate documents to rank in a batch


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneSettings:
    """All settings of a fine-tuning run."""

    task: TaskSettings
    init: Init = PRETRAINED  # where training starts from
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings(epochs=3.0)
    fit: FitSettings = FitSettings()
    # finetune: train all weights; linear: logistic regression over sentence vectors of the frozen model; contrastive:
    # train the sentence vectors by pairs first (SetFit); auto: contrastive, or another method that is clearly better on
    # held-out examples
    method: Method = "finetune"
    folds: int = 0  # folds of train for an additional evaluation by cross-validation; 0: no cross-validation
    method_seconds: float = 120.0  # time for comparing methods; methods that need more are not compared
    seeds: int = 1  # how many runs, with train.seed, train.seed + 1, ...
    max_length: int | None = None  # maximum tokens of a sequence; None: the model's maximum
    long_inputs: LongInputs = "stride"  # longer texts: overlapping windows, or truncation
    eval_precision: Literal["float32", "bfloat16"] = "float32"  # precision of the final evaluation
    eval_baseline: bool = True  # also score a bag of words (classify, regress) or the untrained model (embed, rank)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise HeedfulError(f"seeds is {self.seeds}; expected a whole number from 1")
        if self.folds < 0 or self.folds == 1:
            raise HeedfulError(f"folds is {self.folds}; expected 0 or a whole number from 2")
        if self.method != "finetune" or self.folds:
            self._check_method()
        if self.max_length is not None and self.max_length < 8:
            raise HeedfulError(f"max_length is {self.max_length}; expected a number of tokens from 8")
        if isinstance(self.init, Seq2Seq) and not isinstance(self.task, Seq2SeqSettings):
            kind = SPECS[self.task.kind].public_name
            raise SettingError(f'init.kind is "{self.init.kind}", which is for seq2seq, not {kind}', path="init.kind")
        if isinstance(self.init, ClassicInit):
            SPECS[self.task.kind].check_pooling(self.init.reader, "init.reader", 2)

    def _check_method(self) -> None:
        """Raise a SettingError if the task is not classification, or the method needs a pretrained model."""
        if self.task.kind not in METHOD_TASKS:
            path, value = ("folds", str(self.folds)) if self.method == "finetune" else ("method", f'"{self.method}"')
            name = SPECS[self.task.kind].public_name
            raise SettingError(f"{path} is {value}, which is for classify, not {name}: leave it out", path=path)
        if self.method != "finetune" and not isinstance(self.init, Pretrained):
            raise SettingError(
                f'method is "{self.method}", which needs a pretrained model, but init.kind is "{self.init.kind}": '
                'set method to "finetune"',
                path="method",
            )


def finetune_defaults(
    kind: str,
    examples: int,
    *,
    random_init: bool,
    width: int = 768,
    classic: bool = False,
    seq2seq: Seq2Seq | None = None,
    group_size: int = 1,
    bleu_units: BleuTokenizer | None = "13a",
    characters: int = 0,
    method: Method = "finetune",
    documents: int = 0,
) -> tuple[FinetuneSettings, str]:
    """Return the default settings for some data, and a sentence with the facts that determine them.

    Small data needs more epochs to converge and a smaller batch (Mosbach et al. 2021). Random weights need a higher
    learning rate, and so does a small hidden size: 0.04 / hidden size is 5e-5 for the published base sizes (Devlin et
    al. 2019, appendix A.3).

    Args:
        kind: Name of the task's specification.
        examples: How many training examples there are.
        random_init: Whether the model starts from random weights.
        width: Hidden size of the model.
        classic: Whether the model is from before the Transformer.
        seq2seq: Settings of a seq2seq model with random weights, or None for another task or a pretrained model.
        group_size: How many samples the loss compares with each other. A batch has whole groups.
        bleu_units: Units that BLEU counts. If None, models are ranked by F1 of words.
        characters: Characters of all training texts. CHARS_PER_EXAMPLE of them are equivalent to one example in the
            choice of epochs. 0 if they are not known.
        method: Method of training.
        documents: Documents to rank, over all queries, which then determine epochs instead of examples. 0 for other
            tasks.
    """
    if seq2seq is not None:
        return _seq2seq_defaults(seq2seq, examples, bleu_units)
    epochs = min(_epochs(kind, documents or examples), _epochs(kind, characters // CHARS_PER_EXAMPLE))
    batch_size = 32 if examples >= 10_000 else 16
    if documents:
        batch_size = max(1, round(DOCUMENTS_PER_BATCH * examples / documents))
    batch_size = max(batch_size, group_size) // group_size * group_size
    if classic:
        lr = 2e-3
    elif random_init:
        lr = 5e-4
    else:
        lr = float(f"{0.04 / width:.0e}")
    train = TrainSettings(epochs=epochs, batch_size=batch_size, optimizer=AdamW(lr=lr))
    if method == "contrastive":
        steps = max(MIN_CONTRASTIVE_STEPS, 5 * examples // 16)  # at least five epochs
        train = TrainSettings(max_steps=steps, batch_size=16, optimizer=AdamW(lr=float(f"{0.08 / width:.0e}")))
    settings = FinetuneSettings(
        task=SPECS[kind].settings(),
        train=train,
        fit=FitSettings(eval_every_epochs=1.0 if epochs > 2 else 0.5),
        method=method,
    )
    if classic:
        model = "a classic model"
    elif random_init:
        model = "a fresh encoder"
    else:
        model = f"a trained model {width} wide"
    data = f"{examples:,} queries with {documents:,} documents" if documents else f"{examples:,} examples"
    if epochs < _epochs(kind, documents or examples):
        data += f" of {characters:,} characters"
    return settings, f"defaults for {data} and {model}"


def _epochs(kind: str, examples: int) -> float:
    """Return the default number of epochs of a task for a number of training examples."""
    return next(epochs for min_examples, epochs in SPECS[kind].epochs if examples >= min_examples)


def check_batch_groups(train: TrainSettings, group_size: int) -> None:
    """Raise a SettingError if the batch size is not a multiple of `group_size`, so that groups would be split."""
    if train.batch_size % group_size:
        raise SettingError(
            f"train.batch_size is {train.batch_size}, but an update takes whole groups of {group_size} pairs "
            f"(task.group_size): set train.batch_size to {group_size} or a multiple of it",
            path="train.batch_size",
        )


def _seq2seq_defaults(init: Seq2Seq, examples: int, bleu_units: BleuTokenizer | None) -> tuple[FinetuneSettings, str]:
    """Return the defaults for a seq2seq model with random weights: five times the epochs, and label smoothing.

    A Transformer gets the peak learning rate of the paper, (4000 hidden size)^-0.5 after a warm-up of 4,000 steps, and
    the paper's betas and eps (Vaswani et al. 2017, sections 5.3 and 5.4).
    """
    epochs = 5 * _epochs(SEQ2SEQ.name, examples)
    batch_size = 64 if examples >= 2_000 else 16
    schedule: Schedule = Linear(warmup_ratio=0.1)
    if isinstance(init, RecurrentInit):
        model, optimizer = "two recurrent nets", AdamW(lr=1e-3)
    else:
        model, lr = "a Transformer", float(f"{(4000 * init.shape.width) ** -0.5:.1e}")
        optimizer, schedule = AdamW(lr=lr, betas=(0.9, 0.98), eps=1e-9), Noam(warmup_ratio=0.1)
    metric: Literal["f1", "bleu"] = "bleu" if bleu_units is not None and has_bleu() else "f1"
    metric_note = ""
    if metric == "f1":
        reason = "most targets have fewer than 4 characters" if has_bleu() else "sacrebleu, for BLEU, is not installed"
        metric_note = f", compared by F1 of words, since {reason}"
    elif bleu_units == "char":
        metric_note = ", compared by BLEU of characters, since most targets have fewer than 4 words"
    settings = FinetuneSettings(
        task=Seq2SeqSettings(label_smoothing=0.1, metric=metric, bleu=bleu_units or "13a"),
        train=TrainSettings(epochs=epochs, batch_size=batch_size, optimizer=optimizer, schedule=schedule),
        fit=FitSettings(eval_every_epochs=max(1.0, epochs / 15)),
    )
    return settings, f"defaults for {examples:,} examples and {model} with random weights{metric_note}"


def training_settings(paths: Iterable[str]) -> list[str]:
    """Return the paths, among `paths`, of settings that only the method "finetune" uses."""
    return [path for path in paths if path.startswith(FINETUNE_ONLY) and path not in EVERY_METHOD]


def check_method_settings(method: Method, paths: Iterable[str]) -> None:
    """Raise a SettingError if a setting given by hand, by its path, would change nothing with a method."""
    reasons: dict[Method, str] = {
        "auto": "methods are compared with their own defaults; name one with method",
        "linear": "method is linear, which trains no weights below the last layer",
        "contrastive": "method is contrastive, which is not evaluated while it trains",
    }
    for path in training_settings(paths):
        if method in ("auto", "linear") or (method == "contrastive" and path in EVALUATION_SETTINGS):
            raise SettingError(f"{path} would change nothing: {reasons[method]}; leave it out", path=path)


def training_summary(settings: FinetuneSettings, reason: str, by_hand: Sequence[str] = ()) -> str:
    """Return a sentence with the reason for the defaults, duration, batch size, lr, and settings set by hand.

    Args:
        settings: Settings of the run.
        reason: The sentence from `finetune_defaults`.
        by_hand: Paths of settings that were given by hand.
    """
    train = settings.train
    training = f"{train.duration}, batches of {train.batch_size}, lr {train.optimizer.lr:g}"
    if settings.method == "linear":
        training = "logistic regression over sentence vectors"
    elif settings.method == "contrastive":
        training = f"sentence vectors trained by pairs in {training}, then logistic regression"
    by_hand = [name for name in by_hand if name != "method"]
    text = f"{reason}: {training}{settings.task.summary()}"
    return text + (f"; set by hand: {', '.join(by_hand)}" if by_hand else "")


def run_data_settings(run: str | Path) -> tuple[DataSettings, LongInputs]:
    """Return the data settings of a run, without a generated dev split, and how the run treats long texts.

    If `run` is not a run folder, both are the defaults.
    """
    path = Path(run) / "settings.toml"
    run_settings = load_mapping(path) if path.is_file() else {}
    data_settings = DataSettings()
    data_table = run_settings.get("data")
    if isinstance(data_table, Mapping):  # the "data" of pre-training is a list of paths
        data_settings = overlay(data_settings, data_table, source=f"{path}: data")
    long_inputs: LongInputs = "truncate" if run_settings.get("long_inputs") == "truncate" else "stride"
    return replace(data_settings, dev_fraction=0.0), long_inputs


def check_task(task: str) -> str:
    """Return the name of the task with a name or alias, such as "tag" for "ner".

    Raises:
        HeedfulError: If no task has this name or alias.
    """
    if task in SPECS and task != SPECS[task].public_name:
        name = SPECS[task].public_name
        raise HeedfulError(f'"{task}" is not a task of its own: give {name}, which takes any number of labels too')
    return canonical_task(task)


def finetune_overrides(
    overrides: Mapping[str, object] | Overrides | None = None,
    *,
    model: str | Path = "",
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    flags: Mapping[str, Mapping[str, object]] | None = None,
) -> Overrides:
    """Collect settings given by hand. `Overrides` are returned unchanged."""
    model_flag = {f"--model {model}": {"init.model": str(model), "init.revision": ""}} if str(model) else {}
    return Overrides.of(overrides, recipe=recipe, flags={**model_flag, **(flags or {})}, assignments=assignments)


def preview_settings(task: str, overrides: Overrides) -> FinetuneSettings:
    """Return the settings that are known before the data is read: overrides over the defaults for one example.

    Raises:
        HeedfulError: If an override cannot be used with any specification of the task.
    """
    errors = []
    for spec in specs_named(check_task(task)):
        try:
            return resolve_finetune(overrides, finetune_defaults(spec.name, 1, random_init=False)[0]).settings
        except HeedfulError as error:
            errors.append(error)
    raise errors[-1]


def resolve_finetune(overrides: Overrides, defaults: FinetuneSettings) -> Resolved[FinetuneSettings]:
    """Merge overrides over the defaults of a task, and check that the packages of the task are installed."""
    name = SPECS[defaults.task.kind].public_name
    resolved = overrides.resolve(defaults, fixed={"task.kind": f"the task, {name}, and its data decide it"})
    resolved.settings.task.check()
    return resolved
