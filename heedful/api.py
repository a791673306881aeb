"""The public functions for training and prediction: `finetune`, `pretrain`, `distil` and `predict` of `heedful`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from heedful.data.bad_rows import OnBadRow
from heedful.errors import HeedfulError, SettingError
from heedful.infer.engine import Engine
from heedful.infer.engine_options import check_min_confidence, check_prediction_set
from heedful.infer.precision import PrecisionOrAuto
from heedful.infer.zero_shot import CandidateLabels, zero_shot_engine
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

if TYPE_CHECKING:
    from heedful.toml_json import Json

TrainPrecision = Literal["auto", "float32", "bfloat16"]
DataInput: TypeAlias = object  # a path, frame, data set, list or (texts, targets), or a mapping from splits to these
ModelInput: TypeAlias = object  # a text, a pair of texts or a dict, depending on the head
PATHS = {  # setting paths by keyword argument; any other keyword is the unique last component of a path
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
    data: DataInput,
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
    device: str | None = None,
    precision: TrainPrecision | None = None,
    patience: int | None = None,
    settings: FinetuneSettings | None = None,
    recipe: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    **other_settings: object,
) -> RunResult:
    """Fine-tune a model on labelled data. The defaults of settings depend on the task and the size of the data.

    Args:
        task: Name of the task, such as "classify".
        data: A file or folder, a pandas or polars frame, a data set of the `datasets` library, a list of dicts, a pair
            (texts, labels), or a mapping from splits to any of these.
        output_dir: The run folder; an interrupted run in it is resumed.
        model: A folder, or NAME[@REVISION] on the hub (default: the encoder that ships with Heedful).
        epochs: Passes over the training data. Only one of epochs, max_steps and time_budget can be given.
        max_steps: Number of optimizer steps.
        time_budget: Duration of training, such as "1h30m", or a number of minutes.
        lr: Peak learning rate.
        batch_size: Samples per optimizer step.
        max_length: Maximum sequence length in tokens.
        seed: Random seed.
        seeds: Number of runs, with seed, seed + 1, ...; the result is the run with the best score on the dev split.
        device: "cpu", "cuda" or "cuda:1" (default: a GPU if there is one).
        precision: Dtype of matrix products: "auto", "float32" or "bfloat16".
        patience: Evaluations without a better metric before early stopping. If 0, there is no early stopping.
        settings: All settings, instead of a recipe; other arguments and overrides take precedence.
        recipe: A .toml or .json file of settings.
        overrides: Settings by path or unique last component, such as {"weight_decay": 0.1}.
        on_bad_row: "raise", or "skip" to continue without rows that cannot be read, which are written to a file.
        reporter: Receives progress events.
        other_settings: Any other setting by its unique last component.

    Raises:
        HeedfulError: If the data or a setting cannot be used.
    """
    values = _collect_overrides(
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
    device: str | None = None,
    precision: TrainPrecision | None = None,
    settings: PretrainSettings | None = None,
    recipe: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    **other_settings: object,
) -> RunResult:
    """Pre-train a model on files and folders of text, or on one folder that holds a corpus.

    Args:
        data: Files and folders of text.
        output_dir: The run folder; an interrupted run in it is resumed.
        objective: Name of the objective, such as "mlm" or "clm"; with a teacher, loss terms joined by "+".
        size: Size of a new model with random weights, such as "tiny".
        model: A folder, or NAME[@REVISION] on the hub: a model to train further.
        tokenizer: A folder with a tokenizer (default: a tokenizer is trained on the text).
        teacher: A trained encoder to distil.

    The other arguments are those of `finetune`.
    """
    values = _collect_overrides(
        overrides, other_settings, epochs=epochs, max_steps=max_steps, time_budget=time_budget,
        lr=lr, batch_size=batch_size, seed=seed, device=device, precision=precision,
    )  # fmt: skip
    return pretrain_run.pretrain(
        data, output_dir, objective=objective, size=size, model=model, tokenizer=tokenizer, teacher=teacher,
        recipe=_recipe(recipe, settings), overrides=values, on_bad_row=on_bad_row, reporter=reporter,
    )  # fmt: skip


def distil(
    teacher: str | Path,
    data: DataInput,
    output_dir: str | Path,
    *,
    student: str = "",
    loss: str = "",
    unlabelled: Sequence[str | Path] = (),
    cascade: bool = False,
    epochs: float | None = None,
    max_steps: int | None = None,
    time_budget: float | str | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    device: str | None = None,
    precision: TrainPrecision | None = None,
    patience: int | None = None,
    settings: DistilSettings | None = None,
    recipe: str | Path | None = None,
    overrides: Mapping[str, object] | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    **other_settings: object,
) -> RunResult:
    """Distil a large model (the teacher) into a small one (the student), and compare the two.

    Args:
        teacher: A run, a model folder, or NAME[@REVISION] on the hub; its head decides the task.
        data: Labelled data as for `finetune`; for a masked language model, files of plain text.
        output_dir: The run folder; an interrupted run in it is resumed.
        student: "layers=3" for layers of the teacher, a size such as "tiny", a model folder, or a classic model: "bag",
            "attention" or "bilstm".
        loss: Name of a published combination of losses, such as "distilbert".
        unlabelled: Files and folders of texts without labels.
        cascade: Whether to build a cascade, too, in output_dir/cascade: the student answers where it is confident, and
            the teacher elsewhere. The setting `max_loss` is the allowed loss of accuracy in percentage points.

    The other arguments are those of `finetune`.
    """
    values = _collect_overrides(
        overrides, other_settings, epochs=epochs, max_steps=max_steps, time_budget=time_budget,
        lr=lr, batch_size=batch_size, max_length=max_length, seed=seed, seeds=seeds, device=device,
        precision=precision, patience=patience,
    )  # fmt: skip
    return distil_run.distil(
        teacher, data, output_dir, student=student, loss=loss, unlabelled=unlabelled, cascade=cascade,
        recipe=_recipe(recipe, settings), overrides=values, on_bad_row=on_bad_row, reporter=reporter,
    )  # fmt: skip


def predict(
    model: str | Path | Engine,
    inputs: Iterable[ModelInput],
    answer_type: type[AnyPrediction] | None = None,
    *,
    revision: str | None = None,
    head: str | None = None,
    precision: PrecisionOrAuto | None = None,
    device: str | None = None,
    top_k: int = 5,
    min_confidence: float | None = None,
    prediction_set: float | None = None,
    candidate_labels: Sequence[str] | Mapping[str, str] | None = None,
    template: str | None = None,
    multi_label: bool = False,
) -> list[AnyPrediction]:
    """Predict with a model. Each call loads the model, unless an Engine is passed.

    Args:
        model: A run, a model folder, NAME[@REVISION] on the hub, or an Engine.
        inputs: Texts, or other inputs that the head expects; see `Engine.expects`.
        answer_type: Class of the answers, such as Classification; a type checker then knows their fields.
        revision: Commit or branch on the hub.
        head: Kind of the head to load, instead of the head in config.json.
        precision: "float32", "bfloat16", "float16", "int8" or "auto" (default: float32, on a GPU bfloat16 or float16).
        device: "cpu", "cuda" or "cuda:1" (default: a GPU if there is one).
        top_k: Number of candidates that are listed for each mask.
        min_confidence: Minimum probability of a label. If the most probable label has less, the label is "".
        prediction_set: Probability that the labels in `prediction_set` of an answer include the right one. None:
            answers have no such set.
        candidate_labels: Labels to choose from that the model was not trained on, or a mapping from labels to
            descriptions; for models with a label "entailment", cross-encoders and sentence embedding models.
        template: Text with {} in place of the label or description (default: depends on the kind of model).
        multi_label: Whether any number of candidate labels may be right for a text.

    Raises:
        HeedfulError: If an input cannot be used, or the head answers with another type than `answer_type`.
    """
    coverage = model.prediction_set if isinstance(model, Engine) else prediction_set
    if candidate_labels is not None and coverage is not None:
        raise HeedfulError("prediction_set is for the labels that a model was trained on, not for candidate_labels")
    if not isinstance(model, Engine):
        min_confidence = min_confidence or 0.0
        model = Engine(model, revision=revision, head=head, precision=precision, device=device)
        if min_confidence and candidate_labels is None:
            check_min_confidence(min_confidence, model.loaded.config.head)
        model.min_confidence = min_confidence
        check_prediction_set(prediction_set, model.loaded)
        model.prediction_set = prediction_set
    elif any(value is not None for value in (revision, head, precision, device, min_confidence, prediction_set)):
        raise HeedfulError(
            "revision, head, precision, device, min_confidence or prediction_set was given with an Engine: give it to "
            "Engine() instead"
        )
    if candidate_labels is not None:
        candidates = CandidateLabels.of(candidate_labels, template, multi_label)
        return zero_shot_engine(model, candidates).predict(inputs, answer_type)
    if template is not None or multi_label:
        raise HeedfulError("template or multi_label was given without candidate_labels: give the labels too")
    return model.predict(inputs, answer_type, top_k=top_k)


def _collect_overrides(
    overrides: Mapping[str, object] | None, other_settings: Mapping[str, object], **keywords: object
) -> dict[str, object]:
    """Return all settings that the caller has set, by path or unique last component.

    Args:
        overrides: The argument `overrides` of the public function.
        other_settings: Its keyword arguments that are not in its signature.
        keywords: Its keyword arguments for settings. A value of None means that the caller has not set it.

    Raises:
        SettingError: If a setting is given twice.
    """
    keyword_settings = {PATHS.get(name, name): value for name, value in keywords.items() if value is not None}
    collected: dict[str, object] = {}
    for values in (keyword_settings, other_settings, overrides or {}):
        if repeated := collected.keys() & values.keys():
            name = min(repeated)
            raise SettingError(f"{name} is given twice: give it once", path=name, code="duplicate")
        collected |= values
    return collected


def _recipe(
    recipe: str | Path | None, settings: FinetuneSettings | PretrainSettings | DistilSettings | None
) -> str | Path | dict[str, Json] | None:
    """Return the recipe, or the settings as a mapping, which is accepted as a recipe.

    Raises:
        SettingError: If both arguments are given.
    """
    if recipe is not None and settings is not None:
        raise SettingError("recipe and settings were given: give one of them", code="duplicate")
    return recipe if settings is None else to_mapping(settings)
