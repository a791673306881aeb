"""Every task: encoding and evaluation do not depend on the chunks, the ranks, or the order of merging."""

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
TEXTS = [
    *(" ".join(WORDS[n % 10 :] + WORDS[: n % 7]) for n in range(17)),
    *("", long_text(70), "x", "y ? !", "the z"),
]
LABELS = ("bad", "fair", "good")
COUNT = len(TEXTS)


def spans(n: int) -> tuple[AnswerSpan, ...]:
    """No, one or two answers in the text with index n."""
    words = TEXTS[n].split()
    return tuple(AnswerSpan(word, TEXTS[n].index(word)) for word in words[2 : 2 + n % 3])


def examples(name: str) -> list[Any]:
    """The examples of a task, an example for every text."""
    by_name = {
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
    return by_name[name]


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
for_every_task = pytest.mark.parametrize("name", TASKS)


def task_of(name: str) -> Task:
    """A task for its tiny model."""
    kind, _, options = TASKS[name]
    task: Task = kind(tokenizer=tokenizer(), limit=LIMIT, **options)
    return task


@cache
def model_of(name: str) -> ModelBundle:
    """The tiny model with the task's head."""
    folder = TASKS[name][1]
    model = load_both(folder).model
    if name == "tag":
        return with_head(model, "token_classification", labels=LABEL, seed=2)
    new_model = with_head(model, "embedding") if folder == "bare" else model
    if name == "rank":
        new_model = copy(model)
        new_model.config = replace(model.config, head=replace(model.config.head, score_activation="identity"))  # type: ignore[type-var]
    new_model.thresholds = {NO_ANSWER: 0.3} if name == "qa" else {}
    return new_model


@cache
def engine_answers(name: str) -> dict[str, Any]:
    """The engine's answer to the input of every example, by the representation of the input."""
    inputs = [task_of(name).engine_input(example) for example in examples(name)]
    return {repr(item): answer for item, answer in zip(inputs, Engine(model_of(name))(inputs), strict=True)}


def recorded_engine(name: str) -> Any:
    """An engine that repeats recorded answers, since those of a real one depend slightly on the batch."""
    return lambda inputs: [engine_answers(name)[repr(item)] for item in inputs]


def metrics_of(name: str, measure: EvalMetrics) -> tuple[Any, Any]:
    """The metrics and their intervals."""
    return task_of(name).compute_metrics(measure), measure.intervals()


# -- reading ------------------------------------------------------------------------------------------------------


@for_every_task
@pytest.mark.parametrize("size", [1, 5, 512])
def test_encoding_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    task = task_of(name)
    expected = task.encode_split(examples(name))
    monkeypatch.setattr(module, "CHUNK_EXAMPLES", size)
    encoded = task.encode_split(iter(examples(name)))
    assert expected.examples == encoded.examples == COUNT
    for field in ("tokens", "windowed", "truncated", "truncated_tokens", "skipped"):
        assert getattr(expected, field) == getattr(encoded, field)
    assert len(expected.samples) == len(encoded.samples) > COUNT - 3
    for expected_sample, sample in zip(expected.samples, encoded.samples, strict=True):
        assert sample.tokens.tolist() == expected_sample.tokens.tolist()
        assert sample.types.tolist() == expected_sample.types.tolist()
        assert sample.bounds == expected_sample.bounds
        assert sample.target == expected_sample.target
        assert sample.weight == expected_sample.weight
    assert expected.tokens == sum(map(len, expected.samples))
    truncates = name in ("scored", "pairs")  # the one long text is truncated in embeddings, else windowed
    assert (expected.windowed, expected.truncated) == ((0, 1) if truncates else (1, 0))


@for_every_task
def test_weights_of_an_example_add_up_to_one(name: str) -> None:
    task = task_of(name)
    for example in examples(name):
        weights = [sample.weight for sample in task.encode_split([example]).samples]
        assert name == "tag" or sum(weights) == pytest.approx(1)


@for_every_task
def test_a_task_is_an_objective(name: str) -> None:
    task: Objective = task_of(name)
    samples = task_of(name).encode_split(examples(name)).samples
    batch = task.batch(samples, list(range(len(samples))))
    loaded = model_of(name)
    loss = task.loss(loaded, batch)
    assert loss.sum.dtype == torch.float64
    assert loss.sum.requires_grad
    assert loss.count > 0
    assert loss.count == pytest.approx(float(batch.weights.sum()))
    assert torch.equal(loss.sum, task.loss(loaded, batch.to("cpu")).sum)
    half_precision = deepcopy(loaded).bfloat16()
    assert task.loss(half_precision, batch).sum.dtype == torch.float32, "scores are converted before they are summed"


@for_every_task
def test_an_empty_data_set_is_encoded(name: str) -> None:
    encoded = task_of(name).encode_split([])
    assert (encoded.samples, encoded.examples, encoded.tokens) == ([], 0, 0)


# -- evaluating ---------------------------------------------------------------------------------------------------


@for_every_task
@pytest.mark.parametrize("size", [1, 7, 512])
def test_an_evaluation_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch, name: str, size: int) -> None:
    """With equal answers, metrics are exactly equal; those of a real engine differ in the last digits."""
    task = task_of(name)
    expected = metrics_of(name, evaluate_task(task, recorded_engine(name), examples(name)))
    monkeypatch.setattr(module, "CHUNK_EXAMPLES", size)
    assert metrics_of(name, evaluate_task(task, recorded_engine(name), examples(name))) == expected
    if size == 7:
        metrics, _ = metrics_of(name, evaluate_task(task, Engine(model_of(name)), examples(name)))
        assert metrics[task.metric] == pytest.approx(expected[0][task.metric], abs=1e-5)


def test_an_input_error_names_the_row_of_its_example() -> None:
    labelled = [
        LabelledExample(text=text, label="bad", file="dev.csv", line=n) for n, text in enumerate("abc", start=2)
    ]

    def refuse(inputs: list[Any]) -> list[Any]:
        raise InputError("it has 90 tokens", inputs.index("b"))

    with pytest.raises(HeedfulError, match=r"^dev\.csv:3: it has 90 tokens$"):
        evaluate_task(task_of("classify"), refuse, labelled)


@for_every_task
@pytest.mark.parametrize("ranks", [2, 3, COUNT + 2])
def test_an_evaluation_does_not_depend_on_ranks(name: str, ranks: int) -> None:
    """Rank r of n evaluates every n-th example from r on; metrics are pickled, and merged in any order."""
    task = task_of(name)
    expected = metrics_of(name, evaluate_task(task, recorded_engine(name), examples(name)))
    parts = [
        evaluate_task(task, recorded_engine(name), examples(name), first=rank, step=ranks) for rank in range(ranks)
    ]
    received = [pickle.loads(pickle.dumps(part)) for part in parts]
    for order in (received, received[::-1], [*received[1::2], *received[::2]]):
        assert metrics_of(name, merge_all(order)) == expected
    nested = merge_all(received[:2]).merge_state(merge_all(received[2:] or [task.new_metrics()]))
    assert metrics_of(name, nested) == expected


@for_every_task
def test_the_main_metric_is_a_number_up_to_one(name: str) -> None:
    task = task_of(name)
    metrics, intervals = metrics_of(name, evaluate_task(task, recorded_engine(name), examples(name)))
    assert isinstance(metrics[task.metric], float)
    assert metrics[task.metric] <= 1
    assert metrics["count"] == COUNT
    for key, interval in intervals.items():
        assert interval["low"] <= metrics[key] <= interval["high"], key


@for_every_task
def test_truncated_examples_are_counted_and_reported(name: str) -> None:
    limit = 8
    task = replace(task_of(name), limit=limit, long_inputs="truncate")
    all_examples = examples(name)
    encoded = task.encode_split(all_examples)
    loaded = copy(model_of(name))
    loaded.tokenizer = tokenizer().limited(limit)
    parts = [
        evaluate_task(task, Engine(loaded, max_length=task.truncation_length), all_examples, first=rank, step=2)
        for rank in (0, 1)
    ]
    assert encoded.truncated > 1 and encoded.truncated_tokens > 40
    cut = f"{encoded.truncated} ({encoded.truncated_tokens:,} tokens)"
    note = f"examples longer than the model reads, which were cut: {cut}"
    assert task.report(merge_all(parts))["notes"][-1] == note
    if name not in ("scored", "pairs"):
        whole = evaluate_task(task_of(name), Engine(model_of(name)), all_examples[-3:])
        assert not any("cut" in note for note in task_of(name).report(whole)["notes"])


@for_every_task
def test_on_answer_is_called_once_for_every_example(name: str) -> None:
    task = task_of(name)
    reported: list[int] = []

    def check_answer(index: int, example: Any, answer: Any, scored: Any) -> None:
        assert example == examples(name)[index]
        assert answer is engine_answers(name)[repr(task.engine_input(example))]
        assert scored == task.score_answer(example, answer)
        assert scored.loss >= 0
        reported.append(index)

    for rank in range(3):
        evaluate_task(task, recorded_engine(name), examples(name), first=rank, step=3, on_answer=check_answer)
    assert sorted(reported) == list(range(COUNT)) and reported[:3] == [0, 3, 6]


def test_examples_are_read_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_EXAMPLES", 4)
    read_indices: list[int] = []

    def lazy_examples() -> Iterator[Any]:
        for index, example in enumerate(examples("classify")):
            read_indices.append(index)
            yield example

    def checking_engine(inputs: list[Any]) -> Any:
        assert len(inputs) <= 4
        assert len(read_indices) <= 4 * (1 + len(chunk_sizes))
        chunk_sizes.append(len(inputs))
        return recorded_engine("classify")(inputs)

    chunk_sizes: list[int] = []
    evaluate_task(task_of("classify"), checking_engine, lazy_examples())
    assert sum(chunk_sizes) == COUNT == len(read_indices)


def test_batched_and_log_loss() -> None:
    assert list(batched(iter(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(batched([], 3)) == []
    assert log_loss(1.0) == 0 < log_loss(0.5) < log_loss(0.0) < 28
