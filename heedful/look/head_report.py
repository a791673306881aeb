"""What a model's heads do and are worth: patterns over texts, importance, what masking costs, the price of pruning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful.checkpoint import Loaded
from heedful.data import DataSettings, LeaveOut, Source, read
from heedful.errors import HeedfulError
from heedful.look import head_patterns
from heedful.look.head_masking import gated_heads, open_gates
from heedful.model.config import MaskedTokens, Pretraining
from heedful.model.heads import PretrainingHead
from heedful.packed import Packed
from heedful.runs.evaluate import build_eval_task, open_for_model
from heedful.tasks.task import Task

EXAMPLES = 200  # that losses are taken over
ROWS = 512  # of a batch: importance is a mean over batches
MASKED = 0.15  # of tokens, where the model fills masks
POINTS = 12  # of the price's curve


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadImportance:
    """What a loss over some examples says of each head."""

    measure: str
    loss: float  # the loss as it is
    importance: dict[str, Tensor]  # by part, [layers, heads]: mean over batches of |d loss / d gate|
    effect: dict[str, Tensor]  # by part: the loss with that head masked, less the loss as it is
    pruning_losses: list[float]  # the loss with the first heads of `order` masked: none, then more and more
    masked_counts: list[int]  # how many those are
    order: list[tuple[str, int, int]]  # all heads, the least important ones first


def head_importance(
    loaded: Loaded, batches: Sequence[Callable[[], Tensor]], weights: Sequence[float], measure: str
) -> HeadImportance:
    """From batches that give the sum of their losses; `weights` are how many losses each sums (Michel et al. 2019)."""
    total = sum(weights)
    if not total:
        raise HeedfulError("there is nothing in these examples that a loss could be taken of")

    def whole(gates: dict[str, Tensor] | None = None) -> float:
        with torch.no_grad(), gated_heads(loaded.model, gates or {}):
            return sum(float(batch()) for batch in batches) / total

    gates = {part: each.requires_grad_() for part, each in open_gates(loaded.model).items()}
    importance = {part: torch.zeros_like(each) for part, each in gates.items()}
    with torch.enable_grad(), gated_heads(loaded.model, gates):
        for batch in batches:
            found = torch.autograd.grad(batch(), list(gates.values()), allow_unused=True)
            for part, each in zip(gates, found, strict=True):
                if each is not None:
                    importance[part] += each.abs() / total
    as_it_is = whole()
    effect = {part: torch.zeros_like(each) for part, each in importance.items()}
    for part, each in effect.items():
        for layer in range(each.shape[0]):
            for head in range(each.shape[1]):
                each[layer, head] = whole(_without(loaded, [(part, layer, head)])) - as_it_is
    order = sorted(
        ((part, layer, head) for part, each in effect.items() for layer, head in _places(each)),
        key=lambda place: float(importance[place[0]][place[1], place[2]]),
    )
    masked = sorted({round(len(order) * point / POINTS) for point in range(POINTS + 1)})
    return HeadImportance(
        measure=measure,
        loss=as_it_is,
        importance=importance,
        effect=effect,
        pruning_losses=[whole(_without(loaded, order[:count])) for count in masked],
        masked_counts=masked,
        order=order,
    )


def _places(each: Tensor) -> list[tuple[int, int]]:
    return [(layer, head) for layer in range(each.shape[0]) for head in range(each.shape[1])]


def _without(loaded: Loaded, heads: Sequence[tuple[str, int, int]]) -> dict[str, Tensor]:
    gates = open_gates(loaded.model)
    for part, layer, head in heads:
        gates[part][layer, head] = 0.0
    return gates


# -- losses -----------------------------------------------------------------------------------------------------


def task_losses(loaded: Loaded, task: Task, samples: Sequence[Any]) -> tuple[list[Callable[[], Tensor]], list[float]]:
    """The task's own loss."""
    batches: list[Any] = []
    group: list[Any] = []
    rows = 0
    for sample in samples:
        if group and rows + len(sample.tokens) > ROWS:
            batches.append(group)
            group, rows = [], 0
        group.append(sample)
        rows += len(sample.tokens)
    batches += [group] if group else []
    made = [task.batch(each, list(range(len(each)))) for each in batches]
    with torch.no_grad():
        counts = [float(task.loss(loaded, batch).count) for batch in made]

    def loss(batch: Any) -> Tensor:
        return task.loss(loaded, batch).sum

    return [partial(loss, batch) for batch in made], counts


def mlm_losses(loaded: Loaded, texts: Sequence[Any], seed: int = 0) -> tuple[list[Callable[[], Tensor]], list[float]]:
    """-log p of words that are masked, 15 % of each text (Devlin et al. 2019, section 3.1), always masked."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None and tokenizer.special.mask is not None
    mask = tokenizer.special.mask
    draws = torch.Generator().manual_seed(seed)
    batches: list[tuple[Packed, Tensor, Tensor]] = []
    ids: list[list[int]] = []
    types: list[list[int]] = []
    wanted: list[int] = []
    answers: list[int] = []
    rows = 0

    def close() -> None:
        nonlocal ids, types, wanted, answers, rows
        if wanted:
            batches.append((Packed.of(ids, types), torch.tensor(wanted), torch.tensor(answers)))
        ids, types, wanted, answers, rows = [], [], [], [], 0

    for encoded in tokenizer.encode_batch(list(texts)):
        if rows + len(encoded) > ROWS:
            close()
        inner = [place for place, segment in enumerate(encoded.segments) if segment is not None]
        chosen = [place for place in inner if float(torch.rand((), generator=draws)) < MASKED]
        ids.append([mask if place in chosen else id for place, id in enumerate(encoded.ids)])
        types.append(list(encoded.types))
        wanted += [rows + place for place in chosen]
        answers += [encoded.ids[place] for place in chosen]
        rows += len(encoded)
    close()
    head = loaded.head.masked if isinstance(loaded.head, PretrainingHead) else loaded.head
    assert head is not None

    def loss(batch: Packed, places: Tensor, right: Tensor) -> Tensor:
        scores = head(loaded.rows(batch, wanted=places), batch)
        return torch.nn.functional.cross_entropy(scores, right, reduction="sum")

    return [partial(loss, *each) for each in batches], [float(len(each[1])) for each in batches]


# -- the report -------------------------------------------------------------------------------------------------


def head_report(
    loaded: Loaded, data: str | Path, *, max_texts: int = head_patterns.TEXTS, settings: DataSettings | None = None
) -> dict[str, Any]:
    """Every head with its name, its patterns, and, where the model has a loss on the data, its importance."""
    if not open_gates(loaded.model):
        raise HeedfulError(f"{loaded.source} has no heads of self-attention: there is nothing to name in it")
    source, task, split = _data(loaded, data, settings or DataSettings(dev_fraction=0.0))
    examples = list(islice(source.examples(split), max_texts))
    texts: list[Any] = [each.texts[0] if len(each.texts) == 1 else tuple(each.texts[:2]) for each in examples]
    read = head_patterns.readable_indices(loaded, texts)
    passed = len(texts) - len(read)
    examples, texts = [examples[number] for number in read], [texts[number] for number in read]
    training = loaded.training
    loaded.eval()
    needs = [parameter.requires_grad for parameter in loaded.parameters()]
    loaded.requires_grad_(False)
    try:
        heads = head_patterns.find_head_patterns(loaded, texts, max_texts=max_texts)
        found = _worth(loaded, task, examples[:EXAMPLES])
    finally:
        loaded.train(training)
        for parameter, need in zip(loaded.parameters(), needs, strict=True):
            parameter.requires_grad_(need)
    plain = [head.to_dict() for head in heads]
    if found is not None:
        across = found.importance.get("cross", torch.zeros(0, 0))  # they look at another text
        plain += [
            {"part": "cross", "layer": layer, "head": head, "name": "cross", "patterns": {}}
            for layer, head in _places(across)
        ]
        for each in plain:
            place = each["part"], each["layer"], each["head"]
            each["importance"] = float(found.importance[place[0]][place[1:]])
            each["effect"] = float(found.effect[place[0]][place[1:]])
    over = f" ({passed} more {'was' if passed == 1 else 'were'} passed over: too long to be read at once, or empty)"
    took = f"{len(texts)} texts of {data}{over if passed else ''}"
    told = f"{took}: the share of each head's attention that goes where a pattern says."
    if bad := sum(source.sieve.bad.values()):
        first = source.sieve.first[0]
        left = "1 row was" if bad == 1 else f"{bad} rows were"
        told += f" {left} left out; line {first.line}: {first.reason}."
    if found is None:
        told += f" No head was masked, since there is no loss: {task}"
    return {
        "model": loaded.source,
        "data": str(data),
        "texts": len(texts),
        "passed_over": passed,
        "example": min(texts, key=lambda text: abs(len(" ".join(text) if isinstance(text, tuple) else text) - 120)),
        "patterns": head_patterns.PATTERNS,
        "counts": head_patterns.count_names(heads),
        "strongest": [head.to_dict() | {"name": name} for name, head in head_patterns.strongest_heads(heads).items()],
        "heads": plain,
        "said": told,
        "measure": "" if found is None else found.measure,
        "price": None if found is None else _price(found),
    }


def _price(found: HeadImportance) -> dict[str, Any]:
    half = next(place for place, count in enumerate(found.masked_counts) if 2 * count >= len(found.order))
    said = (
        f"{found.measure} is {found.loss:.4f} with all {len(found.order)} heads, and "
        f"{found.pruning_losses[half]:.4f} with {found.masked_counts[half]} of them masked. "
        "Nothing was trained afterwards."
    )
    return {"measure": found.measure, "values": found.pruning_losses, "masked": found.masked_counts, "said": said}


def _worth(loaded: Loaded, task: Task | str, examples: Sequence[Any]) -> HeadImportance | None:
    """None: the model's head has no loss on such examples."""
    if isinstance(task, Task):
        read = task.read(examples)
        batches, weights = task_losses(loaded, task, read.samples)
        return head_importance(loaded, batches, weights, f"loss on {read.examples - read.left_out} examples")
    if isinstance(loaded.config.head, MaskedTokens | Pretraining):
        texts: list[Any] = [each.texts[0] for each in examples]
        batches, weights = mlm_losses(loaded, texts)
        return head_importance(loaded, batches, weights, f"-log p of masked words in {len(texts)} texts")
    return None


def _data(loaded: Loaded, data: str | Path, settings: DataSettings) -> tuple[Source[Any], Task | str, str]:
    """The data as the model's head reads it, its task, and the split; heads look at any text, and then why no task."""
    try:
        source = open_for_model(loaded, data, settings, LeaveOut())
        split = _split(source)
        return source, build_eval_task(loaded, source, split)[0], split
    except HeedfulError as error:  # a head that answers what no data can score, or data without what it needs
        why = str(error)
    source = read(data, None, settings, on_bad_row=LeaveOut())
    return source, why, _split(source)


def _split(source: Source[Any]) -> str:
    return next((name for name in ("test", "dev") if name in source.splits), source.splits[0])
