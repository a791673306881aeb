"""Tag: every word is learned once, at its first token, as in transformers; metrics are those of seqeval."""

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
LABELS = tuple(NAMES[:1] + NAMES[2:])  # without X, the only label that is not a tag of IOB2
WORDY = long_text(100).split()


def task(**changes: Any) -> Tag:
    """A task for the tiny model, whose labels are O, X, B-PER, I-PER, B-LOC and I-LOC."""
    return Tag(**{"tokenizer": tokenizer(), "limit": LIMIT, "labels": tuple(NAMES)} | changes)


# -- samples ------------------------------------------------------------------------------------------------------


def test_only_the_first_token_of_a_word_has_a_label() -> None:
    encoded = task().encode_split(EXAMPLES)
    first, second, third = encoded.samples
    assert sequence_text(first) == "[CLS] ada lives in paris ##i ##a ##n z ##o ##o ##s . [SEP]"
    assert first.target == ((1, 2, 3, 4, 8, 12), tuple(NAMES.index(tag) for tag in EXAMPLES[0].tags))
    assert sequence_text(second) == "[CLS] who ran [SEP]"  # the second word has no token, so it is not learned
    assert second.target == ((1, 2), (0, 0))
    assert third.target == ((1,), (NAMES.index("I-LOC"),))
    assert {sample.weight for sample in encoded.samples} == {1.0}


def test_a_batch_scores_only_the_first_tokens_of_words() -> None:
    tag_task = task()
    samples = tag_task.encode_split(EXAMPLES).samples
    batch = tag_task.batch(samples, [0] * 3)
    assert batch.rows is not None
    assert batch.rows.tolist() == [1, 2, 3, 4, 8, 12, 15, 16, 19]
    assert batch.targets.tolist() == [number for sample in samples for number in sample.target[1]]
    assert batch.weights.tolist() == [1.0] * 9


def test_sentences_without_tokens_are_left_out() -> None:
    encoded = task().encode_split(
        [TaggedExample(words=("\u200b",), tags=("O",)), TaggedExample(words=(), tags=()), EXAMPLES[2]]
    )
    assert (encoded.examples, encoded.skipped, len(encoded.samples)) == (3, 2, 1)


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
def test_a_word_is_learned_once_in_the_window_with_most_context(kind: str, words: list[str], limit: int) -> None:
    """No word is lost at the edges of windows, and none is learned twice."""
    backend = TOKENIZERS[kind]
    labels = tuple(f"L{index}" for index in range(len(words)))  # the label of a word is its index
    tag_task = Tag(tokenizer=backend, limit=limit, labels=labels)
    example = TaggedExample(words=tuple(words), tags=labels)
    (windows,) = example_windows(tag_task, example)
    assert all(len(window) <= limit for window in windows)
    whole = backend.encode(PreTokenized(words))
    first_position: dict[int, int] = {}  # word -> position of its first token in the whole text
    for position, word in enumerate(whole.words):
        if word is not None:
            first_position.setdefault(word, position)

    learned_at: dict[int, tuple[int, int]] = {}  # word -> (index of the window, position in the window)
    remaining_windows = iter(range(len(windows)))
    for sample in tag_task.encode_split([example]).samples:
        targets = list(zip(*sample.target, strict=True))
        window_index = next(  # windows with equal ids are told apart by the words of their tokens
            index
            for index in remaining_windows
            if windows[index].ids == tuple(sample.tokens.tolist())
            and all(windows[index].words[position] == word for position, word in targets)
        )
        for position, word in targets:
            assert word not in learned_at
            learned_at[word] = window_index, position
            assert windows[window_index].ids[position] == whole.ids[first_position[word]]
    assert learned_at.keys() == first_position.keys()

    for word, (window_index, position) in learned_at.items():
        text_position = first_position[word] - 1  # without [CLS]

        def context(index: int, text_position: int = text_position) -> float:
            """The number of tokens on the shorter side; among equals, longer windows are preferred."""
            length = len(windows[index]) - 2
            left = text_position - windows[index].start
            return min(left, length - 1 - left) + 0.01 * length if 0 <= left < length else -1.0

        assert context(window_index) == max(map(context, range(len(windows))))
        assert position == text_position - windows[window_index].start + 1


def test_truncated_sentences_lose_words_and_are_counted() -> None:
    example = TaggedExample(words=tuple(WORDY), tags=("O",) * len(WORDY))
    encoded = task(long_inputs="truncate", limit=SHORT).encode_split([example])
    (sample,) = encoded.samples
    assert (encoded.truncated, encoded.truncated_tokens) == (1, len(tokenizer().encode(PreTokenized(WORDY))) - SHORT)
    assert len(sample) == SHORT and len(sample.target[0]) < len(WORDY)


# -- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_loss_and_gradient(dtype: torch.dtype, tolerance: float) -> None:
    """For transformers, tokens without a label are marked with -100."""
    pair = load_both("tag", dtype)
    rows = pair.tokenizer([list(example.words) for example in EXAMPLES], is_split_into_words=True, padding=True)
    labels = []
    for row, example in enumerate(EXAMPLES):
        words = rows.word_ids(row)
        labels_of_row = [-100] * len(words)
        for position, (previous, word) in enumerate(zip([None, *words], words, strict=False)):
            if word is not None and word != previous:
                labels_of_row[position] = NAMES.index(example.tags[word])
        labels.append(labels_of_row)
    tensors = {name: torch.tensor(column) for name, column in rows.items()}
    expected = pair.reference(**tensors, labels=torch.tensor(labels)).loss
    for parts in (1, 2):
        loss = backward_all(task(), pair.model, EXAMPLES, parts)
        assert loss.count == 9
        assert sum(label != -100 for labels_of_row in labels for label in labels_of_row) == 9
        assert float(loss.sum) / 9 == pytest.approx(float(expected.detach()), abs=1e-6)
    assert_same_gradients(pair.reference, expected, pair.model, 9, tolerance)


def test_every_word_of_a_long_text_counts_once_in_the_loss() -> None:
    example = TaggedExample(words=tuple(WORDY), tags=tuple(NAMES[n % len(NAMES)] for n in range(len(WORDY))))
    tag_task, model = task(limit=SHORT), load_both("tag").model
    loss = backward_all(tag_task, model, [example])
    assert loss.count == len(WORDY)
    expected = 0.0
    with torch.no_grad():
        for sample in tag_task.encode_split([example]).samples:
            log_probabilities = model(tag_task.batch([sample], [0]).packed).log_softmax(-1)
            for position, label in zip(*sample.target, strict=True):
                expected -= float(log_probabilities[position, label])
    assert float(loss.sum) == pytest.approx(expected, abs=1e-9)


# -- evaluation ---------------------------------------------------------------------------------------------------


def engine_answer(tags: list[str | None], probabilities: list[float | None] | None = None) -> dict[str, Any]:
    """The engine's answer with these tags and their probabilities."""
    return {
        "words": [
            {"text": "w", "label": tag, "probability": share}
            for tag, share in zip(tags, probabilities or [0.5] * len(tags), strict=True)
        ]
    }


def metrics_of(tag_task: Tag, examples: list[Any], answers: list[Any]) -> dict[str, Any]:
    measure = tag_task.update_metrics(tag_task.new_metrics(), examples, answers, range(len(examples)))
    return tag_task.compute_metrics(measure)


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
        ["I-PER", "I-PER", "O"],  # an entity in lenient mode, none in strict mode (seqeval issue 23)
        ["O", "B-LOC", "I-LOC", "O"],
        ["B-PER", "O", "I-LOC"],
        ["O"],
    ]
    gold, predicted = 10 * gold, 10 * predicted
    examples = [TaggedExample(words=("w",) * len(tags), tags=tuple(tags)) for tags in gold]
    measure = tag_task.update_metrics(
        tag_task.new_metrics(), examples, [engine_answer(list(tags)) for tags in predicted], range(40)
    )
    metrics = tag_task.compute_metrics(measure)
    assert metrics["f1"] == metrics[tag_task.metric] == pytest.approx(seqeval.metrics.f1_score(gold, predicted))
    assert metrics["strict_f1"] == pytest.approx(seqeval.metrics.f1_score(gold, predicted, mode="strict", scheme=IOB2))
    assert metrics["f1"] > metrics["strict_f1"] and metrics["scheme"] == "conlleval"
    assert metrics["token_accuracy"] == pytest.approx(seqeval.metrics.accuracy_score(gold, predicted))
    intervals = measure.intervals()
    assert 0.3 < intervals["f1"]["low"] < metrics["f1"] < intervals["f1"]["high"] < 0.8
    for name in ("precision", "recall", "f1", "strict_f1"):
        assert intervals[name]["low"] < metrics[name] < intervals[name]["high"]
        assert intervals[name]["count"] == 40


def test_an_evaluation_with_the_engine_scores_every_word() -> None:
    """Long sentences are split into windows, and a word without tokens is predicted to be O."""
    tag_task = task()  # not all labels are tags of entities, so plain labels are compared
    assert not tag_task.marks_entities and tag_task.metric == "accuracy"
    long = TaggedExample(words=tuple(WORDY), tags=tuple(NAMES[n % len(NAMES)] for n in range(100)))
    examples = [*EXAMPLES, long]
    scored_answers: list[Any] = []
    measure = evaluate_task(
        tag_task,
        Engine(load_both("tag").model),
        examples,
        on_answer=lambda number, example, answer, scored: scored_answers.append(scored),
    )
    metrics = tag_task.compute_metrics(measure)
    assert metrics["count"] == sum(len(example.words) for example in examples)
    predictions = [scored.prediction for scored in scored_answers]
    assert [len(prediction) for prediction in predictions] == [len(example.words) for example in examples]
    right = sum(
        predicted == tag
        for prediction, example in zip(predictions, examples, strict=True)
        for predicted, tag in zip(prediction, example.tags, strict=True)
    )
    assert metrics["accuracy"] == right / metrics["count"]
    assert predictions[1][1] == "O", "the word without tokens"
    with torch.no_grad():
        batch = load_both("tag").tokenizer([list(EXAMPLES[0].words)], is_split_into_words=True, return_tensors="pt")
        best = load_both("tag").reference(**batch).logits[0].argmax(-1)
    first_tokens = (1, 2, 3, 4, 8, 12)  # positions of the first token of each word of the first example
    assert predictions[0] == [NAMES[int(best[position])] for position in first_tokens]
    interval = measure.intervals()["accuracy"]
    assert interval["low"] < metrics["accuracy"] < interval["high"]


def test_words_without_a_prediction_are_wrong() -> None:
    tag_task = task(labels=("NOUN", "VERB"))
    example = TaggedExample(words=("\u200b", "x"), tags=("NOUN", "VERB"))
    answer = engine_answer([None, "VERB"], [None, 0.9])
    assert metrics_of(tag_task, [example], [answer])["accuracy"] == 0.5
    assert tag_task.score_answer(example, answer).correct is False
    entity_task = task(labels=("B-X", "I-X"))  # without O, as if no sentence of train had one
    example = TaggedExample(words=("\u200b", "x"), tags=("B-X", "B-X"))
    answer = engine_answer([None, "B-X"], [None, 0.9])
    assert metrics_of(entity_task, [example], [answer])["recall"] == 0.5


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
def test_the_labels_decide_whether_entities_are_compared(labels: tuple[str, ...], entities: bool) -> None:
    tag_task = task(labels=labels)
    assert (tag_task.marks_entities, tag_task.metric) == (entities, "f1" if entities else "accuracy")
    assert task(labels=labels, metric="precision").metric == "precision"


def test_tags_with_a_leading_dash_are_not_entities() -> None:
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
def test_models_with_other_tag_schemes_are_compared_as_iob2(name: str) -> None:
    """Data is always read as IOB2, whatever the labels of the model are."""
    predicted = OTHER_MARKS[name]
    tag_task = task(labels=tuple(dict.fromkeys(["O", *predicted])))
    assert (tag_task.marks_entities, tag_task.metric) == (True, "f1")
    gold = ("B-PER", "O", "B-LOC", "I-LOC", "I-LOC", "B-LOC", "B-PER", "I-PER")
    example = TaggedExample(words=("w",) * 8, tags=gold)
    without_first_entity = TaggedExample(words=("w",) * 8, tags=("O", *gold[1:]))
    answer = engine_answer(list(predicted))
    metrics = metrics_of(tag_task, [example, without_first_entity], [answer] * 2)
    assert metrics["f1"] == metrics["strict_f1"] == pytest.approx(14 / 15)
    assert (metrics["recall"], metrics["token_accuracy"]) == (1.0, 15 / 16)
    scored = tag_task.score_answer(example, answer)
    assert (scored.prediction, scored.correct) == (list(gold), True)
    assert tag_task.score_answer(without_first_entity, answer).correct is False
    words = [  # every word is one letter and a space
        {"label": tag, "start": 2 * index, "end": 2 * index + 1, "probability": 0.5}
        for index, tag in enumerate(predicted)
    ]
    entities = join_entities("w " * 8, words)
    word_spans = [(entity["label"], entity["start"] // 2, (entity["end"] + 1) // 2) for entity in entities]
    assert word_spans == [("PER", 0, 1), ("LOC", 2, 5), ("LOC", 5, 6), ("PER", 6, 8)]
    (sample,) = tag_task.encode_split([example]).samples
    assert [tag_task.labels[id] for id in sample.target[1]] == predicted, "training uses the scheme of the model"


@pytest.mark.parametrize(
    ("labels", "strict"),
    [
        (("O", "I-PER", "I-LOC"), 1.0),
        (("O", "B-LOC", "I-LOC", "I-PER"), 1.0),
        (("O", "B-LOC", "I-LOC", "B-PER", "I-PER"), 0.0),
    ],
)
def test_an_entity_begins_with_i_if_its_type_has_no_b_label(labels: tuple[str, ...], strict: float) -> None:
    """I-x may begin an entity in IO, and in IOB1 if no two entities are adjacent. Beside a label B-x it may not."""
    tag_task = task(labels=labels)
    example = TaggedExample(words=("a", "b", "c"), tags=("B-PER", "I-PER", "O"))
    answer = engine_answer(["I-PER", "I-PER", "O"])
    metrics = metrics_of(tag_task, [example], [answer])
    assert (metrics["f1"], metrics["strict_f1"]) == (1.0, strict)
    (sample,) = tag_task.encode_split([example]).samples
    assert labels[sample.target[1][0]] == ("B-PER" if "B-PER" in labels else "I-PER")


def test_worse_mistakes_have_larger_losses() -> None:
    tag_task = task(labels=LABELS)
    example = TaggedExample(words=("a", "b"), tags=("B-PER", "O"))
    scored_answers = [
        tag_task.score_answer(example, engine_answer(tags, probabilities))
        for tags, probabilities in (
            (["O", "B-PER"], [0.9, 0.8]),
            (["O", "O"], [0.9, 0.9]),
            (["O", "O"], [0.4, 0.9]),
            ([None, "O"], [None, 0.9]),
            (["B-PER", "O"], [0.5, 0.9]),
            (["B-PER", "O"], [0.9, 0.95]),
        )
    ]
    losses = [scored.loss for scored in scored_answers]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == len(losses)
    assert [scored.correct for scored in scored_answers] == [False, False, False, False, True, True]
    assert scored_answers[0].label == ["B-PER", "O"]
    assert scored_answers[3].prediction == ["O", "O"]


def test_the_end_of_a_word_that_goes_on_in_later_windows(tmp_path: Path) -> None:
    """Windows in which no word begins are not scored, but they decide where the last word ends."""
    text = "ada " + "qwertyuiop" * 9
    (answer,) = Engine(make_model_dir(tmp_path, "tag"))([text])
    assert [(word["start"], word["end"]) for word in answer["words"]] == [(0, 3), (4, 94)]
