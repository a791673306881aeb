"""Report on the attention heads of a model: patterns, importance, effect of masking each head, loss after pruning.

`heedful look RUN --heads DATA` calls `head_report`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.data import Dataset, DataSettings, Example, Skip, read
from heedful.errors import HeedfulError, RequestError
from heedful.look.head_masking import gated_heads, open_gates
from heedful.look.head_patterns import (
    MAX_TEXTS,
    PATTERNS,
    HeadRecord,
    count_names,
    find_head_patterns,
    readable_indices,
    strongest_heads,
)
from heedful.look.inspection import frozen_in_eval_mode
from heedful.model.config import MaskedTokens, Pretraining
from heedful.model.heads import PretrainingHead
from heedful.objectives import Batch, Sample
from heedful.packed import Packed
from heedful.runs.evaluate import build_eval_task, open_for_model
from heedful.tasks.task import Task
from heedful.tokenizer import Encoding

MAX_EXAMPLES = 200  # maximum examples whose loss is computed
ROWS_PER_BATCH = 512  # maximum tokens in a batch of several texts; importance is a mean over batches
MASK_PROB = 0.15  # probability that a token is masked, for the masked language modelling loss
PRUNING_POINTS = 12  # points of the curve of losses after pruning, beside that of all heads
EXAMPLE_CHARS = 120  # characters of a text that is short enough to be shown and long enough to have patterns
BatchLoss = Callable[[], Tensor]  # returns the sum of the losses of a batch
HeadIndex = tuple[str, int, int]  # part, layer, head
Text = str | tuple[str, str]  # a text or a pair


class PruningCurve(TypedDict):
    """Losses with more and more heads masked."""

    measure: str  # name of the loss
    values: list[float]  # losses
    masked: list[int]  # how many heads are masked for each loss
    summary: str


class HeadReport(TypedDict):
    """The report as plain data."""

    model: str
    data: str
    texts: int  # how many texts were read
    passed_over: int  # how many texts were skipped: empty or too long
    example: Text  # a text of medium length
    patterns: dict[str, str]  # descriptions of the patterns, by name
    counts: dict[str, int]  # how many heads have each name
    strongest: list[HeadRecord]  # the head with the largest lift, for each pattern
    heads: list[HeadRecord]
    summary: str
    measure: str  # name of the loss, or "" if the model has no loss on the data
    price: PruningCurve | None  # None if the model has no loss on the data


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadImportance:
    """Importance of each head for a loss over some examples."""

    measure: str  # name of the loss
    loss: float  # loss with all heads
    importance: dict[str, Tensor]  # by part, [layers, heads]: sum over batches of |d loss / d gate| / count of losses
    effect: dict[str, Tensor]  # by part, [layers, heads]: loss with the head masked minus the loss with all heads
    order: list[HeadIndex]  # all heads, the least important first
    masked_counts: list[int]  # counts of masked heads, from 0 to all
    pruning_losses: list[float]  # for each of `masked_counts`, the loss with that many first heads of `order` masked


def head_importance(
    loaded: ModelBundle, batches: Sequence[BatchLoss], counts: Sequence[float], measure: str
) -> HeadImportance:
    """Measure the importance of heads by gradients of their gates and by masking (Michel et al. 2019).

    The loss is the mean over all batches.

    Args:
        loaded: The model, in eval mode; its parameters do not require gradients.
        batches: Functions that return the sum of the losses of a batch.
        counts: How many losses each batch has.
        measure: Name of the loss.

    Raises:
        RequestError: If there are no losses.
    """
    total = sum(counts)
    if not total:
        raise RequestError("the examples have nothing to compute a loss of: give other data")

    def mean_loss(masked: Sequence[HeadIndex] = ()) -> float:
        with torch.no_grad(), gated_heads(loaded.model, _masking_gates(loaded, masked) if masked else {}):
            return sum(float(batch()) for batch in batches) / total

    gates = {part: ones.requires_grad_() for part, ones in open_gates(loaded.model).items()}
    importance = {part: torch.zeros_like(ones) for part, ones in gates.items()}
    with torch.enable_grad(), gated_heads(loaded.model, gates):
        for batch in batches:
            gradients = torch.autograd.grad(batch(), list(gates.values()), allow_unused=True)
            for part, gradient in zip(gates, gradients, strict=True):
                if gradient is not None:
                    importance[part] += gradient.abs() / total
    loss = mean_loss()
    effect = {part: torch.zeros_like(values) for part, values in importance.items()}
    heads = [(part, layer, head) for part, values in effect.items() for layer, head in _indices(values)]
    for part, layer, head in heads:
        effect[part][layer, head] = mean_loss([(part, layer, head)]) - loss
    order = sorted(heads, key=lambda index: float(importance[index[0]][index[1:]]))
    masked_counts = sorted({round(len(order) * point / PRUNING_POINTS) for point in range(PRUNING_POINTS + 1)})
    return HeadImportance(
        measure=measure,
        loss=loss,
        importance=importance,
        effect=effect,
        order=order,
        masked_counts=masked_counts,
        pruning_losses=[mean_loss(order[:count]) for count in masked_counts],
    )


def _indices(values: Tensor) -> list[tuple[int, int]]:
    """Return layer and head of each entry of a matrix [layers, heads]."""
    return [(layer, head) for layer in range(values.shape[0]) for head in range(values.shape[1])]


def _masking_gates(loaded: ModelBundle, heads: Sequence[HeadIndex]) -> dict[str, Tensor]:
    """Return gates that mask these heads."""
    gates = open_gates(loaded.model)
    for part, layer, head in heads:
        gates[part][layer, head] = 0.0
    return gates


# -- losses -----------------------------------------------------------------------------------------------------


def task_losses(loaded: ModelBundle, task: Task, samples: Sequence[Sample]) -> tuple[list[BatchLoss], list[float]]:
    """Return the task's loss of each batch of samples, and how many losses each batch has."""
    groups: list[list[Sample]] = []
    rows = 0
    for sample in samples:
        if not groups or rows + len(sample.tokens) > ROWS_PER_BATCH:
            groups.append([])
            rows = 0
        groups[-1].append(sample)
        rows += len(sample.tokens)
    batches = [task.batch(group, list(range(len(group)))) for group in groups]
    with torch.no_grad():
        counts = [float(task.loss(loaded, batch).count) for batch in batches]

    def loss(batch: Batch) -> Tensor:
        return task.loss(loaded, batch).sum

    return [partial(loss, batch) for batch in batches], counts


class _MaskedText(NamedTuple):
    """A text whose tokens are to be masked at some positions."""

    encoded: Encoding
    positions: list[int]


class _MaskedBatch(NamedTuple):
    """A batch of masked texts."""

    packed: Packed
    rows: Tensor  # rows of the masked tokens
    targets: Tensor  # ids of the masked tokens


def mlm_losses(loaded: ModelBundle, texts: Sequence[Text], seed: int = 0) -> tuple[list[BatchLoss], list[float]]:
    """Return the masked language modelling loss of batches of texts, and how many masked tokens each batch has.

    15 % of the tokens are masked (Devlin et al. 2019, section 3.1), always by the mask token. Batches without a masked
    token are left out.
    """
    tokenizer = loaded.tokenizer
    assert tokenizer is not None and tokenizer.special.mask is not None
    mask = tokenizer.special.mask
    generator = torch.Generator().manual_seed(seed)
    groups: list[list[_MaskedText]] = [[]]
    rows = 0
    for encoded in tokenizer.encode_batch(list(texts)):
        if rows + len(encoded) > ROWS_PER_BATCH:
            groups.append([])
            rows = 0
        positions = [position for position, segment in enumerate(encoded.segments) if segment is not None]
        masked = [position for position in positions if float(torch.rand((), generator=generator)) < MASK_PROB]
        groups[-1].append(_MaskedText(encoded, masked))
        rows += len(encoded)
    batches = [_masked_batch(group, mask) for group in groups if any(text.positions for text in group)]
    head = loaded.head.masked if isinstance(loaded.head, PretrainingHead) else loaded.head
    assert head is not None

    def loss(batch: _MaskedBatch) -> Tensor:
        logits = head(loaded.hidden_states(batch.packed, output_rows=batch.rows), batch.packed)
        return torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum")

    return [partial(loss, batch) for batch in batches], [float(len(batch.rows)) for batch in batches]


def _masked_batch(texts: Sequence[_MaskedText], mask: int) -> _MaskedBatch:
    """Return texts as a batch, with the id of the mask token in place of the tokens to be masked."""
    ids: list[list[int]] = []
    types: list[list[int]] = []
    rows: list[int] = []
    targets: list[int] = []
    start = 0  # row of the first token of the text
    for encoded, positions in texts:
        ids.append([mask if position in positions else id for position, id in enumerate(encoded.ids)])
        types.append(list(encoded.types))
        rows += [start + position for position in positions]
        targets += [encoded.ids[position] for position in positions]
        start += len(encoded)
    return _MaskedBatch(Packed.of(ids, types), torch.tensor(rows), torch.tensor(targets))


# -- the report -------------------------------------------------------------------------------------------------


def head_report(
    loaded: ModelBundle, data: str | Path, *, max_texts: int = MAX_TEXTS, settings: DataSettings | None = None
) -> HeadReport:
    """Describe each attention head by its name and patterns, and, with a loss on the data, by importance and effect.

    Args:
        loaded: The model.
        data: A file or folder of data, labelled or not.
        max_texts: Maximum number of texts to read.
        settings: How to read the data (default: the default settings, without a dev split).

    Raises:
        HeedfulError: If the model has no self-attention heads, or no text can be read.
    """
    if not open_gates(loaded.model):
        raise RequestError(f"{loaded.source} has no self-attention heads: give another model")
    dataset, task, split = _open_data(loaded, data, settings or DataSettings(dev_fraction=0.0))
    examples = list(islice(dataset.examples(split), max_texts))
    texts = [_example_text(example) for example in examples]
    indices = readable_indices(loaded, texts)
    skipped = len(texts) - len(indices)
    examples, texts = [examples[index] for index in indices], [texts[index] for index in indices]
    with frozen_in_eval_mode(loaded):
        heads = find_head_patterns(loaded, texts, max_texts=max_texts)
        importance = _importance(loaded, task, examples[:MAX_EXAMPLES])
    records = [head.to_dict() for head in heads]
    if importance is not None:
        records += _cross_attention_records(importance)
        for record in records:
            index = record["layer"], record["head"]
            record["importance"] = float(importance.importance[record["part"]][index])
            record["effect"] = float(importance.effect[record["part"]][index])
    strongest = []
    for pattern, head in strongest_heads(heads).items():
        strongest_record = head.to_dict()
        strongest_record["name"] = pattern
        strongest.append(strongest_record)
    return {
        "model": loaded.source,
        "data": str(data),
        "texts": len(texts),
        "passed_over": skipped,
        "example": _choose_example(texts),
        "patterns": PATTERNS,
        "counts": count_names(heads),
        "strongest": strongest,
        "heads": records,
        "summary": _summary(data, len(texts), skipped, dataset, task if importance is None else None),
        "measure": "" if importance is None else importance.measure,
        "price": None if importance is None else _pruning_curve(importance),
    }


def _example_text(example: Example) -> Text:
    """Return the text or pair of an example."""
    first, *others = example.texts
    return (first, others[0]) if others else first


def _choose_example(texts: Sequence[Text]) -> Text:
    """Return the text whose length in characters is closest to `EXAMPLE_CHARS`."""

    def distance(text: Text) -> int:
        joined = " ".join(text) if isinstance(text, tuple) else text
        return abs(len(joined) - EXAMPLE_CHARS)

    return min(texts, key=distance)


def _summary(data: str | Path, count: int, skipped: int, dataset: Dataset[Example], no_loss: Task | str | None) -> str:
    """Return the sentences that say what was measured.

    Args:
        data: The file or folder of data.
        count: How many texts were read.
        skipped: How many texts were skipped.
        dataset: The data, with the rows that could not be read.
        no_loss: Why the model has no loss on the data; None if it has one.
    """
    verb = "was" if skipped == 1 else "were"
    note = f" ({skipped} more {verb} skipped: empty, or too long to be read at once)" if skipped else ""
    sentences = [f"{count} texts of {data}{note}: the share of each head's attention that follows a pattern."]
    if bad_rows := sum(dataset.row_errors.bad.values()):
        first_error = dataset.row_errors.first[0]
        rows = "1 row was" if bad_rows == 1 else f"{bad_rows} rows were"
        sentences.append(f"{rows} left out; line {first_error.line}: {first_error.reason}.")
    if no_loss is not None:
        sentences.append(
            f"The importance of heads was not measured, since it needs the loss of labelled data: {no_loss}"
        )
    return " ".join(sentences)


def _cross_attention_records(importance: HeadImportance) -> list[HeadRecord]:
    """Return the heads of cross-attention, without patterns: patterns are about tokens of one text."""
    return [
        {"part": "cross", "layer": layer, "head": head, "name": "cross", "patterns": {}}
        for layer, head in _indices(importance.importance.get("cross", torch.zeros(0, 0)))
    ]


def _pruning_curve(importance: HeadImportance) -> PruningCurve:
    """Return the losses after pruning as plain data, with a sentence on the loss with half of the heads."""
    total = len(importance.order)
    half = next(index for index, count in enumerate(importance.masked_counts) if 2 * count >= total)
    sentence = (
        f"{importance.measure} is {importance.loss:.4f} with all {total} heads, and "
        f"{importance.pruning_losses[half]:.4f} with {importance.masked_counts[half]} of them masked. "
        "Nothing was trained afterwards."
    )
    return {
        "measure": importance.measure,
        "values": importance.pruning_losses,
        "masked": importance.masked_counts,
        "summary": sentence,
    }


def _importance(loaded: ModelBundle, task: Task | str, examples: Sequence[Example]) -> HeadImportance | None:
    """Return the importance of the heads for the task's loss, or for the loss of masked tokens.

    Args:
        loaded: The model.
        task: The task of the data, or why it has none.
        examples: Examples of the data.

    Returns:
        The importance, or None if the data has no task and the model has no head that predicts masked tokens.
    """
    if isinstance(task, Task):
        encoded = task.encode_split(examples)
        batches, counts = task_losses(loaded, task, encoded.samples)
        return head_importance(loaded, batches, counts, f"loss on {encoded.examples - encoded.skipped} examples")
    if isinstance(loaded.config.head, MaskedTokens | Pretraining):
        texts = [example.texts[0] for example in examples]
        batches, counts = mlm_losses(loaded, texts)
        return head_importance(loaded, batches, counts, f"-log p of masked words in {len(texts)} texts")
    return None


def _open_data(
    loaded: ModelBundle, data: str | Path, settings: DataSettings
) -> tuple[Dataset[Example], Task | str, str]:
    """Open the data as labelled data for the model's head; if that is not possible, open it as texts.

    Returns:
        The data, the task or why the data has none, and the split to read.
    """
    try:
        dataset = open_for_model(loaded, data, settings, Skip())
        split = _choose_split(dataset)
        return dataset, build_eval_task(loaded, dataset, split)[0], split
    except HeedfulError as error:  # the head has no task, or the data is not labelled for it
        reason = str(error)
    dataset = read(data, None, settings, on_bad_row=Skip())
    return dataset, reason, _choose_split(dataset)


def _choose_split(dataset: Dataset[Example]) -> str:
    """Return "test", else "dev", else the first split."""
    return next((name for name in ("test", "dev") if name in dataset.splits), dataset.splits[0])
