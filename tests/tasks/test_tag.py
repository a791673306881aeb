"""Tagging learns every word once, at its first piece; evaluations are of words, and name their scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import seqeval.metrics
import torch
from hypothesis import given
from hypothesis import strategies as st
from seqeval.scheme import IOB2

from heedful.data import TaggedExample
from heedful.infer.engine import Engine
from heedful.tasks.tag import Tag, join_entities
from heedful.tasks.task import evaluate_task
from heedful.tokenizer import PreTokenized, Tokenizer, TokenizerSettings, train_tokenizer
from tests.support.model_folders import LIMIT, NAMES, long_text, make_model_dir
from tests.support.task_parity import (
    SHORT,
    assert_same_gradients,
    backward_all,
    example_windows,
    load_both,
    sequence_text,
    tokenizer,
)

EXAMPLES = [
    TaggedExample(
        words=("Ada", "lives", "in", "Parisian", "zoos", "."), tags=("B-PER", "O", "O", "B-LOC", "I-LOC", "O")
    ),
    TaggedExample(words=("who", "\u200b", "ran"), tags=("O", "I-PER", "O")),
    TaggedExample(words=("x",), tags=("I-LOC",)),
]
LABELS = tuple(NAMES[:1] + NAMES[2:])  # "O", "B-PER", ... as entities
WORDY = long_text(100).split()


def task(**more: Any) -> Tag:
    """For the tiny model, whose labels are O, X, B-PER, I-PER, B-LOC and I-LOC."""
    return Tag(**{"tokenizer": tokenizer(), "limit": LIMIT, "labels": tuple(NAMES)} | more)


# -- samples ------------------------------------------------------------------------------------------------------


def test_labels_stand_at_first_pieces_alone() -> None:
    read = task().encode_split(EXAMPLES)
    first, second, third = read.samples
    assert sequence_text(first) == "[CLS] ada lives in paris ##i ##a ##n z ##o ##o ##s . [SEP]"
    assert first.target == ((1, 2, 3, 4, 8, 12), tuple(NAMES.index(tag) for tag in EXAMPLES[0].tags))
    assert sequence_text(second) == "[CLS] who ran [SEP]"  # the second word has no piece, and teaches nothing
    assert second.target == ((1, 2), (0, 0))
    assert third.target == ((1,), (NAMES.index("I-LOC"),))
    assert {sample.weight for sample in read.samples} == {1.0}


def test_a_batch_scores_these_rows_and_no_others() -> None:
    tag_task = task()
    samples = tag_task.encode_split(EXAMPLES).samples
    batch = tag_task.batch(samples, [0] * 3)
    assert batch.rows is not None and batch.rows.tolist() == [1, 2, 3, 4, 8, 12, 15, 16, 19]
    assert batch.targets.tolist() == [number for sample in samples for number in sample.target[1]]
    assert batch.weights.tolist() == [1.0] * 9


def test_sentences_without_pieces_are_left_out() -> None:
    read = task().encode_split(
        [TaggedExample(words=("\u200b",), tags=("O",)), TaggedExample(words=(), tags=()), EXAMPLES[2]]
    )
    assert (read.examples, read.skipped, len(read.samples)) == (3, 2, 1)


TEXTS = ["the cat sat on the mat, the dog ran to Paris and zoos", "über 🦊 naïve e\u0301tude 東京 don't"]
TOKENIZERS: dict[str, Tokenizer] = {
    kind: train_tokenizer(
        TEXTS, TokenizerSettings(algorithm=kind, vocab_size=320 if kind == "bpe" else 90, min_frequency=1)
    )  # type: ignore[arg-type]
    for kind in ("wordpiece", "bpe", "unigram")
}
word = st.text(st.sampled_from("acdehmnoprst.,'éü🦊東\u0301\u200b"), min_size=1, max_size=9)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(st.lists(word, min_size=1, max_size=25), st.integers(4, 30))
def test_every_word_is_learned_once_where_it_sees_most(kind: str, words: list[str], limit: int) -> None:
    """None is lost at the edges of windows, none counts twice."""
    backend = TOKENIZERS[kind]
    labels = tuple(f"L{number}" for number in range(len(words)))  # tells which word a label belongs to
    tag_task = Tag(tokenizer=backend, limit=limit, labels=labels)
    example = TaggedExample(words=tuple(words), tags=labels)
    (windows,) = example_windows(tag_task, example)
    assert all(len(window) <= limit for window in windows)
    whole = backend.encode(PreTokenized(words))
    first = {word: place for place, word in reversed(list(enumerate(whole.words))) if word is not None}
    seen: dict[int, tuple[int, int]] = {}  # word -> the number of its window, and the place in it
    samples = tag_task.encode_split([example]).samples
    numbers = iter(range(len(windows)))
    for sample in samples:
        targets = list(zip(*sample.target, strict=True))
        number = next(  # two windows may have the same ids
            n
            for n in numbers
            if windows[n].ids == tuple(sample.tokens.tolist())
            and all(windows[n].words[place] == label for place, label in targets)
        )
        for place, label in targets:
            assert label not in seen
            seen[label] = number, place
            assert windows[number].ids[place] == whole.ids[first[label]]
    assert seen.keys() == first.keys()
    for label, (number, place) in seen.items():  # nowhere else has it more around it
        token = first[label] - 1

        def context(number: int, token: int = token) -> float:
            length = len(windows[number]) - 2
            index = token - windows[number].start
            return min(index, length - 1 - index) + 0.01 * length if 0 <= index < length else -1.0

        assert context(number) == max(map(context, range(len(windows))))
        assert place == token - windows[number].start + 1


def test_cut_sentences_lose_words_and_say_so() -> None:
    example = TaggedExample(words=tuple(WORDY), tags=("O",) * len(WORDY))
    read = task(long_inputs="truncate", limit=SHORT).encode_split([example])
    (sample,) = read.samples
    assert (read.truncated, read.truncated_tokens) == (1, len(tokenizer().encode(PreTokenized(WORDY))) - SHORT)
    assert len(sample) == SHORT and len(sample.target[0]) < len(WORDY)


# -- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_loss_and_gradient(dtype: torch.dtype, tolerance: float) -> None:
    """transformers pads labels with -100, and labels the pieces of a word by hand."""
    pair = load_both("tag", dtype)
    rows = pair.tokenizer([list(example.words) for example in EXAMPLES], is_split_into_words=True, padding=True)
    labels = []
    for number, example in enumerate(EXAMPLES):
        words = rows.word_ids(number)
        fresh = [word is not None and word != before for before, word in zip([None, *words], words, strict=False)]
        labels.append(
            [NAMES.index(example.tags[word]) if new else -100 for word, new in zip(words, fresh, strict=True)]
        )
    tensors = {name: torch.tensor(column) for name, column in rows.items()}
    expected = pair.reference(**tensors, labels=torch.tensor(labels)).loss
    for parts in (1, 2):
        loss = backward_all(task(), pair.model, EXAMPLES, parts)
        assert loss.count == 9 == sum(label != -100 for row in labels for label in row)
        assert float(loss.sum) / 9 == pytest.approx(float(expected.detach()), abs=1e-6)
    assert_same_gradients(pair.reference, expected, pair.model, 9, tolerance)


def test_every_word_of_a_long_text_counts_once_in_the_loss() -> None:
    example = TaggedExample(words=tuple(WORDY), tags=tuple(NAMES[n % len(NAMES)] for n in range(len(WORDY))))
    tag_task, ours = task(limit=SHORT), load_both("tag").model
    loss = backward_all(tag_task, ours, [example])
    assert loss.count == len(WORDY)
    with torch.no_grad():
        each = -sum(
            float(torch.log_softmax(rows[place], -1)[label])
            for sample in tag_task.encode_split([example]).samples
            for rows in [ours(tag_task.batch([sample], [0]).packed)]
            for place, label in zip(*sample.target, strict=True)
        )
    assert float(loss.sum) == pytest.approx(each, abs=1e-9)


# -- evaluation ---------------------------------------------------------------------------------------------------


def answered(tags: list[str | None], shares: list[float | None] | None = None) -> dict[str, Any]:
    """As the engine answers."""
    return {
        "words": [
            {"text": "w", "label": tag, "probability": share}
            for tag, share in zip(tags, shares or [0.5] * len(tags), strict=True)
        ]
    }


def test_lenient_and_strict_scores_agree_with_seqeval() -> None:
    tag_task = task(labels=LABELS)
    assert tag_task.marks_entities and tag_task.metric == "f1"
    gold = [
        ["B-PER", "I-PER", "O"],
        ["O", "B-LOC", "I-LOC", "I-LOC"],
        ["B-PER", "O", "O"],
        ["O"],
    ]
    predicted = [
        ["I-PER", "I-PER", "O"],  # seqeval#23: right when lenient, nothing when strict
        ["O", "B-LOC", "I-LOC", "O"],
        ["B-PER", "O", "I-LOC"],
        ["O"],
    ]
    gold, predicted = 10 * gold, 10 * predicted
    examples = [TaggedExample(words=("w",) * len(tags), tags=tuple(tags)) for tags in gold]
    measure = tag_task.update_metrics(
        tag_task.new_metrics(), examples, [answered(list(tags)) for tags in predicted], range(40)
    )
    measured = tag_task.compute_metrics(measure)
    assert measured["f1"] == measured[tag_task.metric] == pytest.approx(seqeval.metrics.f1_score(gold, predicted))
    assert measured["strict_f1"] == pytest.approx(seqeval.metrics.f1_score(gold, predicted, mode="strict", scheme=IOB2))
    assert measured["f1"] > measured["strict_f1"] and measured["scheme"] == "conlleval"
    assert measured["token_accuracy"] == pytest.approx(seqeval.metrics.accuracy_score(gold, predicted))
    intervals = measure.intervals()
    assert 0.3 < intervals["f1"]["low"] < measured["f1"] < intervals["f1"]["high"] < 0.8
    for name in ("precision", "recall", "f1", "strict_f1"):
        assert intervals[name]["low"] < measured[name] < intervals[name]["high"] and intervals[name]["count"] == 40


def test_an_evaluation_through_the_engine_has_every_word() -> None:
    """Long sentences are windowed, a word without pieces is outside; predictions are those of transformers."""
    tag_task = task()  # X is no mark of an entity, so these labels are plain
    assert not tag_task.marks_entities and tag_task.metric == "accuracy"
    long = TaggedExample(words=tuple(WORDY), tags=tuple(NAMES[n % len(NAMES)] for n in range(100)))
    examples = [*EXAMPLES, long]
    asked: list[tuple[int, Any]] = []
    measure = evaluate_task(
        tag_task,
        Engine(load_both("tag").model),
        examples,
        on_answer=lambda number, example, answer, judged: asked.append((number, judged)),
    )
    metrics = tag_task.compute_metrics(measure)
    assert metrics["count"] == sum(len(example.words) for example in examples)
    predictions = [judged.prediction for _, judged in asked]
    assert [len(prediction) for prediction in predictions] == [len(example.words) for example in examples]
    right = sum(
        a == b
        for prediction, tags in zip(predictions, examples, strict=True)
        for a, b in zip(prediction, tags.tags, strict=True)
    )
    assert metrics["accuracy"] == right / metrics["count"]
    assert predictions[1][1] == "O"
    with torch.no_grad():
        rows = load_both("tag").tokenizer([list(EXAMPLES[0].words)], is_split_into_words=True, return_tensors="pt")
        best = load_both("tag").reference(**rows).logits[0].argmax(-1)
    assert predictions[0] == [NAMES[int(best[place])] for place in (1, 2, 3, 4, 8, 12)]
    interval = measure.intervals()["accuracy"]
    assert interval["low"] < metrics["accuracy"] < interval["high"]


def test_words_of_which_nothing_is_said_are_wrong_among_plain_labels() -> None:
    tag_task = task(labels=("NOUN", "VERB"))
    example = TaggedExample(words=("\u200b", "x"), tags=("NOUN", "VERB"))
    answer = answered([None, "VERB"], [None, 0.9])
    assert (
        tag_task.compute_metrics(tag_task.update_metrics(tag_task.new_metrics(), [example], [answer], [0]))["accuracy"]
        == 0.5
    )
    assert tag_task.score_answer(example, answer).correct is False
    entity = task(labels=("B-X", "I-X"))  # no sentence of train has an O
    example = TaggedExample(words=("\u200b", "x"), tags=("B-X", "B-X"))
    answer = answered([None, "B-X"], [None, 0.9])
    assert (
        entity.compute_metrics(entity.update_metrics(entity.new_metrics(), [example], [answer], [0]))["recall"] == 0.5
    )


@pytest.mark.parametrize(
    ("labels", "entities"),
    [
        (("O", "B-PER", "I-PER"), True),
        (("B-x",), True),
        (("O", "S-PER", "E-PER"), True),
        (("O", "U-PER", "L-PER"), True),
        (("NOUN", "O"), False),
        (("O", "X-PER"), False),
        (("O", "SYM-x"), False),
        (("B", "M", "E", "S"), False),
        (("B", "I", "O"), False),
        (("-", "O"), False),
    ],
)
def test_what_is_compared_follows_the_labels(labels: tuple[str, ...], entities: bool) -> None:
    tag_task = task(labels=labels)
    assert (tag_task.marks_entities, tag_task.metric) == (entities, "f1" if entities else "accuracy")
    assert task(labels=labels, metric="precision").metric == "precision"


def test_words_of_tags_with_a_leading_dash_are_no_entities() -> None:
    words = [
        {"label": label, "start": n, "end": n + 1, "probability": 1.0} for n, label in enumerate(("-", "-LRB-") * 2)
    ]
    assert join_entities("abcd", [*words, *words[1::2]]) == []


IOBES = ["S-PER", "O", "B-LOC", "I-LOC", "E-LOC", "S-LOC", "B-PER", "E-PER"]
OTHER_MARKS = {
    "IOBES": IOBES,
    "BILOU": ["U-PER", "O", "B-LOC", "I-LOC", "L-LOC", "U-LOC", "B-PER", "L-PER"],
    "BMES": ["S-PER", "O", "B-LOC", "M-LOC", "E-LOC", "S-LOC", "B-PER", "E-PER"],
}


@pytest.mark.parametrize("name", OTHER_MARKS)
def test_heads_with_other_marks_are_compared_as_iob2(name: str) -> None:
    """Data is always read as IOB2, whatever the labels of the model are."""
    predicted = OTHER_MARKS[name]
    tag_task = task(labels=tuple(dict.fromkeys(["O", *predicted])))
    assert (tag_task.marks_entities, tag_task.metric) == (True, "f1")
    gold = ("B-PER", "O", "B-LOC", "I-LOC", "I-LOC", "B-LOC", "B-PER", "I-PER")
    example, spoiled = (
        TaggedExample(words=("w",) * 8, tags=gold),
        TaggedExample(words=("w",) * 8, tags=("O", *gold[1:])),
    )
    answer = answered(list(predicted))
    metrics = tag_task.compute_metrics(
        tag_task.update_metrics(tag_task.new_metrics(), [example, spoiled], [answer] * 2, [0, 1])
    )
    assert metrics["f1"] == metrics["strict_f1"] == pytest.approx(14 / 15)  # 7 right of 7 and 8
    assert (metrics["recall"], metrics["token_accuracy"]) == (1.0, 15 / 16)
    judged = tag_task.score_answer(example, answer)
    assert (judged.prediction, judged.correct) == (list(gold), True)
    assert tag_task.score_answer(spoiled, answer).correct is False
    words = [{"label": tag, "start": 2 * n, "end": 2 * n + 1, "probability": 0.5} for n, tag in enumerate(predicted)]
    spans = [
        (entity["label"], entity["start"] // 2, (entity["end"] + 1) // 2) for entity in join_entities("w " * 8, words)
    ]
    assert spans == [("PER", 0, 1), ("LOC", 2, 5), ("LOC", 5, 6), ("PER", 6, 8)]
    (sample,) = tag_task.encode_split([example]).samples  # and learned in their own marks
    assert [tag_task.labels[number] for number in sample.target[1]] == predicted


@pytest.mark.parametrize(
    ("labels", "strict"),
    [
        (("O", "I-PER", "I-LOC"), 1.0),
        (("O", "B-LOC", "I-LOC", "I-PER"), 1.0),
        (("O", "B-LOC", "I-LOC", "B-PER", "I-PER"), 0.0),
    ],
)
def test_what_no_label_begins_begins_with_i(labels: tuple[str, ...], strict: float) -> None:
    """In IO, and in IOB1 where two of a type never met, I-x begins an entity; where there is B-x it should not."""
    tag_task = task(labels=labels)
    example = TaggedExample(words=("a", "b", "c"), tags=("B-PER", "I-PER", "O"))
    answer = answered(["I-PER", "I-PER", "O"])
    metrics = tag_task.compute_metrics(tag_task.update_metrics(tag_task.new_metrics(), [example], [answer], [0]))
    assert (metrics["f1"], metrics["strict_f1"]) == (1.0, strict)
    (sample,) = tag_task.encode_split([example]).samples
    assert labels[sample.target[1][0]] == ("B-PER" if "B-PER" in labels else "I-PER")


def test_mistakes_come_in_order() -> None:
    tag_task = task(labels=LABELS)
    example = TaggedExample(words=("a", "b"), tags=("B-PER", "O"))
    judged = [
        tag_task.score_answer(example, answered(tags, shares))
        for tags, shares in (
            (["O", "B-PER"], [0.9, 0.8]),
            (["O", "O"], [0.9, 0.9]),
            (["O", "O"], [0.4, 0.9]),
            ([None, "O"], [None, 0.9]),
            (["B-PER", "O"], [0.5, 0.9]),
            (["B-PER", "O"], [0.9, 0.95]),
        )
    ]
    loss = [scored.loss for scored in judged]
    assert loss == sorted(loss, reverse=True) and len(set(loss)) == len(loss)
    assert [scored.correct for scored in judged] == [False, False, False, False, True, True]
    assert judged[0].label == ["B-PER", "O"] and judged[3].prediction == ["O", "O"]


def test_the_last_word_ends_where_it_ends(tmp_path: Path) -> None:
    """Windows in which no word begins are not scored, but tell how far the last one goes."""
    text = "ada " + "qwertyuiop" * 9
    (answer,) = Engine(make_model_dir(tmp_path, "tag"))([text])
    assert [(word["start"], word["end"]) for word in answer["words"]] == [(0, 3), (4, 94)]
