"""FinetunePlan: the data and the settings of a fine-tuning run, checked against each other before training.

Fine-tuning, its dry run and tuning all begin with `plan_finetune`. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heedful.checkpoint import config_of
from heedful.data import Dataset, DataSettings, Raise, Skip, dataset_for_task
from heedful.data.bad_rows import BadRowPolicy, OnBadRow
from heedful.data.examples import Example, LabelledExample, MultiLabelExample
from heedful.data.labelled.statistics import (
    DatasetStats,
    check_learnable,
    compute_stats,
    dev_split_problem,
    split_warnings,
)
from heedful.model.config import ModelConfig
from heedful.runs.finetune.checks import check_dev_split, check_unused_settings
from heedful.runs.finetune.init_settings import ClassicInit, Init, Pretrained, RecurrentInit, Seq2Seq, model_name
from heedful.runs.finetune.seq2seq import check_bleu, default_bleu_units, sample_targets
from heedful.runs.finetune.settings import (
    FEW_EXAMPLES,
    FinetuneSettings,
    Method,
    check_batch_groups,
    check_method_settings,
    check_task,
    finetune_defaults,
    finetune_overrides,
    preview_settings,
    resolve_finetune,
    training_settings,
    training_summary,
)
from heedful.runs.overrides import Overrides
from heedful.tasks.specs import specs_named
from heedful.train.freezing import check_freezing


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetunePlan:
    """Settings and data of a fine-tuning run."""

    settings: FinetuneSettings
    source: Dataset[Example]  # labelled data
    stats: DatasetStats  # statistics of the data
    notes: tuple[str, ...]  # sentences about empty splits and rows that are left out
    why: str  # sentence with the settings of training, and the reason for their defaults
    labels: tuple[str, ...] | None = None  # labels of the model's head; None: labels of the data
    comparison: Mapping[str, object] | None = None  # scores of methods on held-out examples; None: not compared


class OpenedData:
    """The data of a task with its statistics, read once for each value of the data settings.

    Several plans for the same data can share one instance.

    Args:
        task: Name of the task.
        data: Labelled data in any form that `heedful.data.read` accepts.
        on_bad_row: "raise", or "skip" to leave out rows that cannot be read.
    """

    def __init__(self, task: str, data: object, on_bad_row: OnBadRow) -> None:
        self._example_class = specs_named(task)[0].example
        self._data = data
        self._bad_row_policy: BadRowPolicy = Skip() if on_bad_row == "skip" else Raise()
        self._opened: list[tuple[DataSettings, Dataset[Example], DatasetStats]] = []

    def open(self, settings: DataSettings) -> tuple[Dataset[Example], DatasetStats]:
        """Return the data, and the statistics of all splits, train first."""
        for opened_settings, dataset, stats in self._opened:
            if opened_settings == settings:
                return dataset, stats
        dataset = dataset_for_task(self._example_class, self._data, settings, self._bad_row_policy)
        stats = compute_stats(dataset, ("train", *(split for split in dataset.splits if split != "train")))
        self._opened.append((settings, dataset, stats))
        return dataset, stats


def plan_finetune(
    task: str,
    data: object,
    *,
    model: str | Path = "",
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, object] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    opened: OpenedData | None = None,
    needs_dev: bool = False,
) -> FinetunePlan:
    """Open the data, and merge overrides over the defaults for it. Most arguments are documented at `finetune`.

    Args:
        opened: The same data, shared with other plans. If None, the data is read for this plan.
        needs_dev: Whether a generated dev split is never added to train, however small the data is.

    Raises:
        HeedfulError: If nothing can be learned from the data, or if a setting cannot be used with it.
    """
    task = check_task(task)
    overrides = finetune_overrides(overrides, model=model, recipe=recipe, assignments=assignments)
    preview = preview_settings(task, overrides)
    data_settings = preview.data
    opened = opened or OpenedData(task, data, on_bad_row)
    dataset, stats = opened.open(data_settings)
    if dev_problem := dev_split_problem(dataset, stats):  # no dev split can be made, so all examples are for training
        data_settings = replace(data_settings, dev_fraction=0.0)
        dataset, stats = opened.open(data_settings)
    method = _choose_method(overrides, preview, dataset, stats)
    if not needs_dev and _trains_on_all(method, overrides, preview, dataset, stats):
        data_settings = replace(data_settings, dev_fraction=0.0)
        dataset, stats = opened.open(data_settings)
    check_learnable(dataset, stats)
    spec = next(spec for spec in specs_named(task) if spec.example is dataset.kind)
    init, config = _resolve_init(preview.init)
    is_classic = isinstance(init, ClassicInit | RecurrentInit)
    group_size = preview.task.samples_per_group(scored=stats.min_score is not None)
    targets = sample_targets(dataset, stats.non_empty_splits)
    has_windows = not (is_classic or preview.long_inputs == "truncate" or spec.truncates)
    defaults, reason = finetune_defaults(
        spec.name,
        stats.counts["train"],
        random_init=not model_name(init),
        width=0 if config is None else config.width,
        classic=is_classic,
        seq2seq=init if isinstance(init, Seq2Seq) else None,
        group_size=group_size,
        bleu_units=default_bleu_units(targets),
        characters=stats.num_characters["train"] if has_windows else 0,
        method=method,
        documents=stats.num_documents,
    )
    resolved = resolve_finetune(overrides, defaults)
    settings = replace(resolved.settings, init=init, data=data_settings)
    check_method_settings(settings.method, tuple(resolved.sources))
    if isinstance(init, ClassicInit):
        spec.check_pooling(init.reader, "init.reader", len(dataset.labels))
    check_batch_groups(settings.train, group_size)
    check_bleu(settings.task, targets)
    settings.task.check_data(stats)
    check_dev_split(settings, stats, dev_problem)
    check_unused_settings(settings, stats, classic=is_classic and not model_name(init))
    if settings.train.freeze_layers:
        check_freezing(config, settings.train.freeze_layers, init.reinit_layers if isinstance(init, Pretrained) else 0)
    notes = [f"{dev_problem}, so all are train"] if dev_problem else []
    notes += split_warnings(stats)
    for name, count in dataset.row_errors.bad.items():
        notes.append(f"bad rows of {Path(name).name} that are left out: {count:,}")
    summary = training_summary(settings, reason, tuple(resolved.sources))
    return FinetunePlan(settings=settings, source=dataset, stats=stats, notes=tuple(notes), why=summary)


def _resolve_init(init: Init) -> tuple[Init, ModelConfig | None]:
    """Return settings of the initial model, and the configuration of the pretrained model or None.

    The path of a folder is normalised, so that different spellings give equal settings.
    """
    if not isinstance(init, Pretrained | ClassicInit) or not init.model:
        return init, None
    if Path(init.model).is_dir():
        init = replace(init, model=os.path.normpath(init.model))
    return init, config_of(init.model, revision=init.revision or None).model


def _choose_method(
    overrides: Overrides, preview: FinetuneSettings, dataset: Dataset[Example], stats: DatasetStats
) -> Method:
    """Return the method that was given by hand, or the default one.

    The default is "auto" for classification with a pretrained model and few labels, if no settings were given that only
    fine-tuning uses. Otherwise it is "finetune".
    """
    resolved = overrides.resolve(preview)
    is_classification = dataset.kind in (LabelledExample, MultiLabelExample)
    has_few_labels = is_classification and _count_examples(dataset, stats) < FEW_EXAMPLES
    if resolved.has("method") or not has_few_labels or not isinstance(preview.init, Pretrained):
        return preview.method
    return "finetune" if training_settings(resolved.sources) else "auto"


def _trains_on_all(
    method: Method, overrides: Overrides, preview: FinetuneSettings, dataset: Dataset[Example], stats: DatasetStats
) -> bool:
    """Whether to train on the examples of a generated dev split too, since the data is small.

    That is never done for the method "finetune", or if the user requested a dev split or tuned thresholds.
    """
    needs_dev = overrides.resolve(preview).has("data.dev_fraction") or preview.task.tunes_thresholds(stats)
    is_small = _count_examples(dataset, stats) < FEW_EXAMPLES
    return method != "finetune" and dataset.has_generated_dev and is_small and not needs_dev


def _count_examples(dataset: Dataset[Example], stats: DatasetStats) -> int:
    """Return how many training examples there are, including a generated dev split."""
    return stats.counts["train"] + (stats.counts.get("dev", 0) if dataset.has_generated_dev else 0)
