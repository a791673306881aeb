"""The functions that `import heedful` offers for training and prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from heedful.data.bad_rows import OnBadRow
from heedful.errors import HeedfulError, SettingError
from heedful.infer.engine import Engine
from heedful.infer.precision import PrecisionOrAuto
from heedful.runs.distil import run as distil_run
from heedful.runs.distil.settings import DistilSettings
from heedful.runs.finetune import run as finetune_run
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.pretrain import run as pretrain_run
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.results import RunResult
from heedful.settings import to_mapping
from heedful.tasks.predictions import AnyPrediction
from heedful.train.fit import Reporter

Device = Literal["cpu", "cuda"]
TrainPrecision = Literal["auto", "float32", "bfloat16"]
PATHS = {  # of keywords that are no unique name of a setting, or shorter than one
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "time_budget": "train.time_budget",
    "seed": "train.seed",
    "precision": "train.precision",
    "device": "train.device",
    "lr": "train.optimizer.lr",
    "batch_size": "train.batch_size",
    "patience": "fit.patience",
}


def finetune(
    task: str,
    data: Any,
    output_dir: str | Path,
    *,
    model: str | Path = "",
    epochs: float | None = None,
    max_steps: int | None = None,
    time_budget: float | str | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    device: Device | None = None,
    precision: TrainPrecision | None = None,
    patience: int | None = None,
    settings: FinetuneSettings | None = None,
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    **other_settings: Any,
) -> RunResult:
    """Fine-tune a model on labelled data. Settings that are not given follow from the data.

    Args:
        task: Name of the task, such as "classify".
        data: A file or folder, a frame of pandas or polars, a data set of the `datasets` library, a list of dicts, a
            pair (texts, labels), or a mapping of splits to any of these.
        output_dir: The run folder; an interrupted run in it is resumed.
        model: A folder, or NAME[@REVISION] on the hub; "": the encoder that ships with Heedful.
        epochs: Passes over the training data. Only one of epochs, max_steps and time_budget can be given.
        max_steps: Number of updates.
        time_budget: Duration of training, such as "1h30m", or a number of minutes.
        lr: Peak learning rate.
        batch_size: Samples of an update.
        max_length: Maximum number of tokens of a sequence.
        seed: Random seed.
        seeds: Number of runs, with seed, seed + 1, ...; the best one on dev is kept.
        device: "cpu" or "cuda".
        precision: Of matrix products.
        patience: Evaluations without a better metric after which training stops; 0: never.
        settings: All settings, instead of a recipe; arguments and overrides go over them.
        recipe: A .toml or .json file of settings.
        overrides: Settings by path or unique last component, such as {"weight_decay": 0.1}.
        on_bad_row: "raise", or "skip" to set rows aside that cannot be read.
        reporter: Receives progress.
        other_settings: Any other setting by its unique last component.

    Raises:
        HeedfulError: If the data or a setting cannot be used.
    """
    values = _values(
        overrides, other_settings, epochs=epochs, max_steps=max_steps, time_budget=time_budget,
        lr=lr, batch_size=batch_size, max_length=max_length, seed=seed, seeds=seeds, device=device,
        precision=precision, patience=patience,
    )  # fmt: skip
    return finetune_run.finetune(
        task, data, output_dir, model=model, recipe=_recipe(recipe, settings), overrides=values,
        on_bad_row=on_bad_row, reporter=reporter,
    )  # fmt: skip


def pretrain(
    data: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    *,
    objective: str = "",
    size: str = "",
    model: str | Path = "",
    tokenizer: str | Path = "",
    teacher: str | Path = "",
    epochs: float | None = None,
    max_steps: int | None = None,
    time_budget: float | str | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    device: Device | None = None,
    precision: TrainPrecision | None = None,
    settings: PretrainSettings | None = None,
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    **other_settings: Any,
) -> RunResult:
    """Pre-train a model on files and folders of text, or on one folder that holds a corpus.

    Args:
        data: Files and folders of text.
        output_dir: The run folder; an interrupted run in it is resumed.
        objective: Such as "mlm" or "clm", or terms of a distillation joined by "+".
        size: Of a model with random weights, such as "tiny".
        model: A folder, or NAME[@REVISION] on the hub, to continue from.
        tokenizer: A folder with a tokenizer; "": one is trained.
        teacher: A trained encoder to distil, for an objective of terms.

    The other arguments are those of `finetune`.
    """
    values = _values(
        overrides, other_settings, epochs=epochs, max_steps=max_steps, time_budget=time_budget,
        lr=lr, batch_size=batch_size, seed=seed, device=device, precision=precision,
    )  # fmt: skip
    return pretrain_run.pretrain(
        data, output_dir, objective=objective, size=size, model=model, tokenizer=tokenizer, teacher=teacher,
        recipe=_recipe(recipe, settings), overrides=values, on_bad_row=on_bad_row, reporter=reporter,
    )  # fmt: skip


def distil(
    teacher: str | Path,
    data: Any,
    output_dir: str | Path,
    *,
    student: str = "",
    loss: str = "",
    unlabelled: Sequence[str | Path] = (),
    epochs: float | None = None,
    max_steps: int | None = None,
    time_budget: float | str | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    device: Device | None = None,
    precision: TrainPrecision | None = None,
    patience: int | None = None,
    settings: DistilSettings | None = None,
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    **other_settings: Any,
) -> RunResult:
    """Train a small student to predict what a teacher predicts, and compare the two.

    Args:
        teacher: A run, a model folder, or NAME[@REVISION] on the hub; its head decides the task.
        data: Labelled data as for `finetune`; files of plain text for a masked language model.
        output_dir: The run folder; an interrupted run in it is resumed.
        student: "layers=3", a size such as "tiny", a model folder, or "bag", "attention", "bilstm".
        loss: Name of a published combination of losses, such as "distilbert".
        unlabelled: Files and folders of texts without labels.

    The other arguments are those of `finetune`.
    """
    values = _values(
        overrides, other_settings, epochs=epochs, max_steps=max_steps, time_budget=time_budget,
        lr=lr, batch_size=batch_size, max_length=max_length, seed=seed, seeds=seeds, device=device,
        precision=precision, patience=patience,
    )  # fmt: skip
    return distil_run.distil(
        teacher, data, output_dir, student=student, loss=loss, unlabelled=unlabelled,
        recipe=_recipe(recipe, settings), overrides=values, on_bad_row=on_bad_row, reporter=reporter,
    )  # fmt: skip


def predict(
    model: str | Path | Engine,
    inputs: Iterable[Any],
    answer_type: type[AnyPrediction] | None = None,
    *,
    revision: str | None = None,
    head: str | None = None,
    precision: PrecisionOrAuto | None = None,
    device: str | None = None,
    top_k: int = 5,
) -> list[AnyPrediction]:
    """Predict with a run or a model folder. An Engine that is kept loads the model only once.

    Args:
        model: A run, a model folder, NAME[@REVISION] on the hub, or an Engine.
        inputs: Texts, or whatever the head takes; see `Engine.expects`.
        answer_type: Class of the answers, such as Classification; a type checker then knows their fields.
        revision: Of a name on the hub.
        head: Kind of head, instead of the one that config.json names.
        precision: "float32", "bfloat16", "int8" or "auto"; None: float32.
        device: "cpu" or "cuda"; None: "cpu".
        top_k: Number of candidates that are listed for each mask.

    Raises:
        HeedfulError: If an input cannot be used, or the head answers with another class than `answer_type`.
    """
    if not isinstance(model, Engine):
        model = Engine(model, revision=revision, head=head, precision=precision, device=device)
    elif any(value is not None for value in (revision, head, precision, device)):
        raise HeedfulError("model is an Engine, and revision, head, precision or device is given: give it to Engine()")
    return model.predict(inputs, answer_type, top_k=top_k)


def _values(overrides: Mapping[str, Any] | None, others: Mapping[str, Any], **common: Any) -> dict[str, Any]:
    """All settings that were given, by path or short name."""
    given = {PATHS.get(name, name): value for name, value in common.items() if value is not None}
    values: dict[str, Any] = {}
    for more in (given, others, overrides or {}):
        if twice := values.keys() & more.keys():
            name = min(twice)
            raise SettingError(f"{name} is given twice; give it once", path=name, code="duplicate")
        values |= more
    return values


def _recipe(recipe: str | Path | None, settings: Any) -> Any:
    """The recipe, or settings as one."""
    if recipe is not None and settings is not None:
        raise SettingError("recipe and settings are given; give one of them", code="duplicate")
    return recipe if settings is None else to_mapping(settings)
