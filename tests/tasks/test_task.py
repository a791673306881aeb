"""Reading and evaluating: the same whatever the chunks, the ranks and the order in which they are merged."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.data import (
    AnswerSpan,
    ChoiceExample,
    LabelledExample,
    MultiLabelExample,
    PairExample,
    QuestionExample,
    RankExample,
    ScoredExample,
    TaggedExample,
)
from heedful.errors import HeedfulError, InputError
from heedful.infer.engine import Engine
from heedful.objectives import Objective
from heedful.tasks import task as module
from heedful.tasks.classify import Classify, ClassifyMultiLabel
from heedful.tasks.embed import Embed
from heedful.tasks.metrics import merge_all
from heedful.tasks.multiple_choice import MultipleChoiceTask
from heedful.tasks.qa import NO_ANSWER, QuestionAnswering
from heedful.tasks.rank import Rank
from heedful.tasks.regress import Regress
from heedful.tasks.tag import Tag
from heedful.tasks.task import EvalMetrics, Task, batched, evaluate_task, log_loss
from tests.support.model_folders import LIMIT, NAMES, long_text
from tests.support.task_parity import load_both, tokenizer

WORDS = "ada lives in paris and zed wrote the first program".split()  # noqa: SIM905
TEXTS = [" ".join(WORDS[n % 10 :] + WORDS[: n % 7]) for n in range(17)] + ["", long_text(70), "x", "y ? !", "the z"]
LABELS = ("bad", "fair", "good")
COUNT = len(TEXTS)


def spans(n: int) -> tuple[AnswerSpan, ...]:
    """Some answers: none, one or two."""
    words = TEXTS[n].split()
    return tuple(AnswerSpan(word, TEXTS[n].index(word)) for word in words[2 : 2 + n % 3])


def examples(name: str) -> list[Any]:
    """Of a task, all different."""
    some = {
        "classify": [LabelledExample(text=text, label=LABELS[n % 3]) for n, text in enumerate(TEXTS)],
        "multiple": [
            MultiLabelExample(text=text, labels=tuple(x for k, x in enumerate(LABELS) if n >> k & 1))
            for n, text in enumerate(TEXTS)
        ],
        "regress": [ScoredExample(text=text, score=n / 7) for n, text in enumerate(TEXTS)],
        "tag": [
            TaggedExample(words=tuple(text.split()), tags=tuple(LABEL[(n + k) % 5] for k in range(len(text.split()))))
            for n, text in enumerate(TEXTS)
        ],
        "qa": [
            QuestionExample(id=str(n), question=WORDS[n % 10], context=text, answers=spans(n))
            for n, text in enumerate(TEXTS)
        ],
        "multiple-choice": [
            ChoiceExample(prompt=text, candidates=tuple(WORDS[n % 4 : n % 4 + 2 + n % 3]), answer=n % 2)
            for n, text in enumerate(TEXTS)
        ],
        "rank": [
            RankExample(
                query=text, documents=tuple(WORDS[n % 4 : n % 4 + 2 + n % 3]), relevance=(1.0, *[0.0] * (1 + n % 3))
            )
            for n, text in enumerate(TEXTS)
        ],
        "scored": [PairExample(anchor=text, positive=WORDS[n % 10], score=n / 21) for n, text in enumerate(TEXTS)],
        "pairs": [PairExample(anchor=text, positive=" ".join(text.split()[::-1])) for text in TEXTS],
    }
    return some[name]


LABEL = tuple(name for name in NAMES if name != "X")
TASKS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "classify": (Classify, "single", {"labels": LABELS}),
    "multiple": (ClassifyMultiLabel, "multiple", {"labels": LABELS}),
    "regress": (Regress, "regression", {"labels": ("stars",)}),
    "tag": (Tag, "tag", {"labels": LABEL}),
    "qa": (QuestionAnswering, "span", {"has_unanswerable": True}),
    "multiple-choice": (MultipleChoiceTask, "choice", {}),
    "rank": (Rank, "regression", {}),
    "scored": (Embed, "bare", {"scored": True}),
    "pairs": (Embed, "bare", {"scored": False, "group_size": 2}),
}
each_task = pytest.mark.parametrize("name", TASKS)


def task_of(name: str) -> Task:
    """For a tiny model."""
    kind, _, more = TASKS[name]
    task: Task = kind(tokenizer=tokenizer(), limit=LIMIT, **more)
    return task


@cache
def model_of(name: str) -> ModelBundle:
    """The tiny model with the task's head."""
    folder = TASKS[name][1]
    ours = load_both(folder).model
    if name == "tag":
        return with_head(ours, "token_classification", labels=LABEL, seed=2)
    new_model = with_head(ours, "embedding") if folder == "bare" else ours
    if name == "rank":
        new_model = copy(ours)
        new_model.config = replace(ours.config, head=replace(ours.config.head, score_activation="identity"))  # type: ignore[type-var]
    new_model.thresholds = {NO_ANSWER: 0.3} if name == "qa" else {}
    return new_model


@cache
def answers(name: str) -> dict[str, Any]:
    """What the engine says to each input."""
    inputs = [task_of(name).engine_input(example) for example in examples(name)]
    return {repr(item): answer for item, answer in zip(inputs, Engine(model_of(name))(inputs), strict=True)}


def ask(name: str) -> Any:
    """The same answer to the same input, to the last bit."""
    return lambda inputs: [answers(name)[repr(item)] for item in inputs]


def metrics_of(name: str, measure: EvalMetrics) -> tuple[Any, Any]:
    """All numbers and intervals."""
    return task_of(name).compute_metrics(measure), measure.intervals()


# -- reading ------------------------------------------------------------------------------------------------------


@each_task
@pytest.mark.parametrize("size", [1, 5, 512])
def test_reading_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    task = task_of(name)
    whole = task.encode_split(examples(name))
    monkeypatch.setattr(module, "CHUNK_EXAMPLES", size)
    again = task.encode_split(iter(examples(name)))
    assert whole.examples == again.examples == COUNT
    for field in ("tokens", "windowed", "truncated", "truncated_tokens", "skipped"):
        assert getattr(whole, field) == getattr(again, field)
    assert len(whole.samples) == len(again.samples) > COUNT - 3
    for one, other in zip(whole.samples, again.samples, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.types.tolist() == other.types.tolist()
        assert (one.bounds, one.target, one.weight) == (other.bounds, other.target, other.weight)
    assert whole.tokens == sum(map(len, whole.samples))
    assert (whole.windowed, whole.truncated) == ((0, 1) if name in ("scored", "pairs") else (1, 0))


@each_task
def test_weights_of_an_example_add_up_to_one(name: str) -> None:
    task = task_of(name)
    for example in examples(name):
        weights = [sample.weight for sample in task.encode_split([example]).samples]
        assert name == "tag" or sum(weights) == pytest.approx(1)


@each_task
def test_a_task_is_an_objective(name: str) -> None:
    task: Objective = task_of(name)
    samples = task_of(name).encode_split(examples(name)).samples
    batch = task.batch(samples, list(range(len(samples))))
    loaded = model_of(name)
    loss = task.loss(loaded, batch)
    assert loss.sum.dtype == torch.float64 and loss.sum.requires_grad and loss.count > 0
    assert loss.count == pytest.approx(float(batch.weights.sum()))
    same = task.loss(loaded, batch.to("cpu"))
    assert torch.equal(loss.sum, same.sum)
    low = deepcopy(loaded).bfloat16()  # scores of half precision are made wide before anything is summed
    assert task.loss(low, batch).sum.dtype == torch.float32


@each_task
def test_an_empty_data_set_is_read(name: str) -> None:
    read = task_of(name).encode_split([])
    assert (read.samples, read.examples, read.tokens) == ([], 0, 0)


# -- evaluating ---------------------------------------------------------------------------------------------------


@each_task
@pytest.mark.parametrize("size", [1, 7, 512])
def test_an_evaluation_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    """To the last bit where the answers are the same; the engine's own differ in the last digits."""
    task = task_of(name)
    expected = metrics_of(name, evaluate_task(task, ask(name), examples(name)))
    monkeypatch.setattr(module, "CHUNK_EXAMPLES", size)
    assert metrics_of(name, evaluate_task(task, ask(name), examples(name))) == expected
    if size == 7:
        read_examples, _ = metrics_of(name, evaluate_task(task, Engine(model_of(name)), examples(name)))
        assert read_examples[task.metric] == pytest.approx(expected[0][task.metric], abs=1e-5)


def test_the_row_that_cannot_be_asked_is_named() -> None:
    rows = [LabelledExample(text=text, label="bad", file="dev.csv", line=n) for n, text in enumerate("abc", start=2)]

    def refuse(inputs: list[Any]) -> list[Any]:
        raise InputError("it has 90 tokens", inputs.index("b"))

    with pytest.raises(HeedfulError, match=r"^dev\.csv:3: it has 90 tokens$"):
        evaluate_task(task_of("classify"), refuse, rows)


@each_task
@pytest.mark.parametrize("ranks", [2, 3, COUNT + 2])
def test_an_evaluation_does_not_depend_on_ranks(name: str, ranks: int) -> None:
    """Each rank takes every so-manieth example; measures are told between processes, and merged in any order."""
    task = task_of(name)
    expected = metrics_of(name, evaluate_task(task, ask(name), examples(name)))
    parts = [evaluate_task(task, ask(name), examples(name), first=rank, step=ranks) for rank in range(ranks)]
    sent = [pickle.loads(pickle.dumps(part)) for part in parts]
    for order in (sent, sent[::-1], [*sent[1::2], *sent[::2]]):
        assert metrics_of(name, merge_all(order)) == expected
    nested = merge_all(sent[:2]).merge_state(merge_all(sent[2:] or [task.new_metrics()]))
    assert metrics_of(name, nested) == expected


@each_task
def test_the_number_to_compare_by_is_there_and_is_larger_when_better(name: str) -> None:
    task = task_of(name)
    read_examples, intervals = metrics_of(name, evaluate_task(task, ask(name), examples(name)))
    assert isinstance(read_examples[task.metric], float)
    assert read_examples[task.metric] <= 1
    assert read_examples["count"] == COUNT
    for key, interval in intervals.items():
        assert interval["low"] <= read_examples[key] <= interval["high"], key


@each_task
def test_what_is_cut_is_counted_and_said(name: str) -> None:
    task, limit = replace(task_of(name), limit=8, long_inputs="truncate"), 8
    all_examples = examples(name)
    read = task.encode_split(all_examples)
    loaded = copy(model_of(name))
    loaded.tokenizer = tokenizer().limited(limit)
    parts = [
        evaluate_task(task, Engine(loaded, max_length=task.truncation_length), all_examples, first=rank, step=2)
        for rank in (0, 1)
    ]
    assert read.truncated > 1 and read.truncated_tokens > 40
    note = f"examples longer than the model reads, which were cut: {read.truncated} ({read.truncated_tokens:,} tokens)"
    assert task.report(merge_all(parts))["notes"][-1] == note
    if name not in ("scored", "pairs"):
        whole = evaluate_task(task_of(name), Engine(model_of(name)), all_examples[-3:])
        assert not any("cut" in note for note in task_of(name).report(whole)["notes"])


@each_task
def test_each_answer_is_told_once(name: str) -> None:
    task = task_of(name)
    seen: list[int] = []

    def note(number: int, example: Any, answer: Any, judged: Any) -> None:
        assert examples(name)[number] == example and answer is answers(name)[repr(task.engine_input(example))]
        assert judged == task.score_answer(example, answer) and judged.loss >= 0
        seen.append(number)

    for rank in range(3):
        evaluate_task(task, ask(name), examples(name), first=rank, step=3, on_answer=note)
    assert sorted(seen) == list(range(COUNT)) and seen[:3] == [0, 3, 6]


def test_examples_are_taken_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_EXAMPLES", 4)
    indices: list[int] = []

    def source() -> Iterator[Any]:
        for number, example in enumerate(examples("classify")):
            indices.append(number)
            yield example

    def watching(inputs: list[Any]) -> Any:
        assert len(inputs) <= 4 and len(indices) <= 4 * (1 + len(sizes))
        sizes.append(len(inputs))
        return ask("classify")(inputs)

    sizes: list[int] = []
    evaluate_task(task_of("classify"), watching, source())
    assert sum(sizes) == COUNT == len(indices)


def test_chunks_and_surprise() -> None:
    assert list(batched(iter(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(batched([], 3)) == []
    assert log_loss(1.0) == 0 < log_loss(0.5) < log_loss(0.0) < 28
