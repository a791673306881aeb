"""How tasks make windows of long texts and answers of scores, with scores written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heedful.errors import HeedfulError
from heedful.model.config import Classes, TokenClasses
from heedful.tasks import classify, multiple_choice, next_sentence, qa, tag
from heedful.tasks.answering import (
    AnswerContext,
    Window,
    best_context_positions,
    group_by_window,
    split_windows,
    strip_span,
)
from heedful.tasks.fill_mask import likely_tokens, mask_name
from heedful.tasks.label_answers import unique_label_names
from heedful.tokenizer import Encoding, PreTokenized, Tokenizer, TokenizerSettings, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer trained on a few words."""
    return train_tokenizer(["the cat sat on the mat, the dog ran"], TokenizerSettings(vocab_size=60, min_frequency=1))


def window(length: int, start: int = 0, segment: int = 0) -> Encoding:
    """An encoding of `length` tokens between two special ones, beginning at token `start` of the text."""
    inner = range(start, start + length)
    return Encoding(
        ids=tuple(range(length + 2)),
        types=(0,) * (length + 2),
        segments=(None, *(segment for _ in inner), None),
        offsets=((0, 0), *((2 * n, 2 * n + 1) for n in inner), (0, 0)),
        words=(None, *inner, None),
        start=start,
    )


def context(tokenizer: Tokenizer, head: Any) -> AnswerContext:
    """The context of an answer for this head."""
    return AnswerContext(tokenizer=tokenizer, head=head, top_k=5)


def test_a_token_is_scored_in_the_window_with_most_context() -> None:
    windows = [window(6), window(6, start=3), window(3, start=6)]
    chosen = best_context_positions(windows)
    token_positions = [windows[index].start + position - 1 for index, position in chosen]
    assert token_positions == list(range(9)), "every token once, in order"
    assert [index for index, _ in chosen] == [0, 0, 0, 0, 0, 1, 1, 1, 1], "with equal context, the first window"
    assert group_by_window(chosen, 3) == [[1, 2, 3, 4, 5], [3, 4, 5, 6], []]
    chosen = best_context_positions([window(4), window(6, start=1)])
    assert [index for index, _ in chosen] == [0, 0, 1, 1, 1, 1, 1], "the longer window is preferred"
    assert best_context_positions([window(0)]) == []
    assert best_context_positions([window(2)], segment=1) == []


@pytest.mark.parametrize("limit", [6, 7, 20, 51, 52, None])
def test_windows_equal_the_tokenizers(tokenizer: Tokenizer, limit: int | None) -> None:
    text = "the cat sat on the mat, the dog ran " * 5
    for item, other_tokens in ((text, 0), (("the", text), 2), (PreTokenized(text.split()), 0)):
        encoded = tokenizer.encode(item)
        expected = [encoded]
        if limit is not None:
            stride = (limit - 2 - other_tokens) // 2
            expected = tokenizer.windows(item, max_length=limit, stride=max(1, stride))
        assert split_windows(item, encoded, limit) == expected


@pytest.mark.parametrize("limit", [5, 9, 20, 33])
@pytest.mark.parametrize(
    ("first", "second"), [(0, 90), (3, 90), (90, 0), (90, 3), (14, 90), (90, 14), (90, 90), (14, 9)]
)
def test_windows_of_a_pair_contain_every_pair_of_tokens(
    tokenizer: Tokenizer, first: int, second: int, limit: int
) -> None:
    """A text that fits into half of the limit is whole in every window; otherwise both texts are split."""
    words = "the cat sat on mat dog ran".split()  # noqa: SIM905
    item = tuple(" ".join(words[index % 7] for index in range(count)) for count in (first, second))
    whole, half = tokenizer.encode(item), (limit - 3) // 2

    def ids_of_text(encoding: Encoding, segment: int) -> list[int]:
        return [id for id, its_segment in zip(encoding.ids, encoding.segments, strict=True) if its_segment == segment]

    windows = split_windows(item, whole, limit)
    token_pairs = set()
    for window in windows:
        assert len(window) <= limit
        assert (window.ids[0], window.ids[-1]) == (whole.ids[0], whole.ids[-1])
        tokens_in_window = []
        for segment, start in enumerate((window.first_text_start, window.start)):
            ids = ids_of_text(window, segment)
            assert ids == ids_of_text(whole, segment)[start : start + len(ids)]
            tokens_in_window.append(range(start, start + len(ids)))
        assert first > half or len(tokens_in_window[0]) == first
        assert second > half or len(tokens_in_window[1]) == second
        token_pairs |= {(a, b) for a in tokens_in_window[0] or [-1] for b in tokens_in_window[1] or [-1]}
    assert len(token_pairs) == max(1, first) * max(1, second)
    if first <= half and len(whole) > limit:
        assert windows == tokenizer.windows(item, max_length=limit, stride=max(1, (limit - 3 - first) // 2))


def test_a_limit_without_room_for_windows_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(HeedfulError, match=r"leaves no room to window: 3 special tokens are in every window"):
        split_windows(("the cat", "sat on"), tokenizer.encode(("the cat", "sat on")), 4)


def test_strip_span_and_unique_label_names() -> None:
    assert strip_span(" ab ", 0, 4) == (1, 3)
    assert strip_span("   ", 0, 3) == (0, 0)
    assert unique_label_names(["a", "a", "b"]) == ["a/0", "a/1", "b/2"]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("B-PER I-PER O B-LOC", [("PER", "w0 w1"), ("LOC", "w3")]),
        ("I-PER I-PER I-LOC", [("PER", "w0 w1"), ("LOC", "w2")]),  # entities that begin with I, as in conlleval
        ("B-PER B-PER I-PER", [("PER", "w0"), ("PER", "w1 w2")]),
        ("B-PER O I-PER", [("PER", "w0"), ("PER", "w2")]),
        ("B-PER I-LOC I-PER", [("PER", "w0"), ("LOC", "w1"), ("PER", "w2")]),
        (
            "S-LOC B-PER E-PER E-PER U-LOC L-LOC",
            [("LOC", "w0"), ("PER", "w1 w2"), ("PER", "w3"), ("LOC", "w4"), ("LOC", "w5")],
        ),
        ("O NOUN O", []),
        ("B-a-b I-a-b", [("a-b", "w0 w1")]),
        ("", []),
    ],
)
def test_entities(labels: str, expected: list[tuple[str, str]]) -> None:
    text = " ".join(f"w{index}" for index in range(9))
    words = [
        {"text": f"w{index}", "label": label, "probability": 0.5, "start": 3 * index, "end": 3 * index + 2}
        for index, label in enumerate(labels.split())
    ]
    entities = tag.join_entities(text, words)
    assert [(entity["label"], entity["text"]) for entity in entities] == expected
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in entities)


def test_offsets_of_input_words_are_in_the_joined_text(tokenizer: Tokenizer) -> None:
    head = TokenClasses(labels=("O", "B-X", "I-X"))
    encoded = window(3)
    scores = torch.tensor([[0.0, 9, 0], [0, 0, 9], [9, 0, 0]])
    answer = tag.tag_answer(["🦊🦊", "b", "ccc"], [Window(encoded, [1, 2, 3], scores)], context(tokenizer, head))
    assert [(entity["text"], entity["start"], entity["end"]) for entity in answer["entities"]] == [("🦊🦊 b", 0, 4)]
    assert [word["start"] for word in answer["words"]] == [0, 3, 5]
    assert answer["entities"][0]["probability"] == pytest.approx(torch.tensor([0.0, 9, 0]).softmax(0)[1].item())


def test_best_span() -> None:
    scores = torch.zeros(50, 2)
    scores[2, 0], scores[40, 1], scores[1, 1] = 5, 5, 9
    start, stop, score = qa.best_span(scores, list(range(1, 49)), 48)
    assert (start, stop) == (1, 1) and score == 9, "2 to 40 is too long, and 2 to 1 would go backwards"
    scores[31, 1] = 6
    assert qa.best_span(scores, list(range(1, 49)), 48)[:2] == (2, 31), "30 tokens are allowed"
    scores[49, 1] = 99  # a position after the context
    assert qa.best_span(scores, list(range(1, 49)), 48)[:2] == (2, 31)
    scores[40, 1] = 7
    assert qa.best_span(scores, list(range(1, 49)), 48, 39)[:2] == (2, 40)
    assert qa.best_span(scores, list(range(1, 49)), 48, 38)[:2] == (2, 31)
    assert qa.best_span(scores, list(range(1, 49)), 48, 1)[:2] == (1, 1)


def test_class_probabilities_are_averaged_over_windows(tokenizer: Tokenizer) -> None:
    windows = [Window(window(1), [], torch.tensor([8.0, 0.0])), Window(window(1), [], torch.tensor([0.0, 1.0]))]
    head = Classes(labels=("yes", "no"))
    answer = classify.classify_answer("x", windows, context(tokenizer, head))
    expected = (torch.tensor([8.0, 0]).softmax(0)[0] + torch.tensor([0.0, 1]).softmax(0)[0]).item() / 2
    assert answer["label"] == "yes"
    assert answer["probability"] == pytest.approx(expected)
    assert answer["windows"] == 2
    multi_label_head = Classes(labels=("yes", "no"), problem_type="multi_label_classification")
    multi_label_answer = classify.classify_answer("x", windows, context(tokenizer, multi_label_head))
    assert multi_label_answer["labels"] == ["yes", "no"]
    assert multi_label_answer["probabilities"]["no"] == pytest.approx((0.5 + torch.tensor(1.0).sigmoid().item()) / 2)
    regression_head = Classes(labels=("a", "b"), problem_type="regression")
    regression_answer = classify.classify_answer("x", windows, context(tokenizer, regression_head))
    assert regression_answer == {"values": {"a": 4.0, "b": 0.5}, "windows": 2}


def test_pairs_and_choices(tokenizer: Tokenizer) -> None:
    head = Classes(labels=("x",))
    windows = [Window(window(2), [], torch.tensor([1.0, 1.0]))]
    answer = next_sentence.next_sentence_answer(("a", "b"), windows, context(tokenizer, head))
    assert answer == {"is_next_probability": 0.5}
    scores = [Window(window(1), [], torch.tensor(float(number))) for number in (0, 2, 1)]
    choice_input = {"prompt": "p", "choices": ["a", "b", "c"]}
    best = multiple_choice.choice_answer(choice_input, scores, context(tokenizer, head))
    assert (best["choice"], best["index"]) == ("b", 1)
    assert sum(best["probabilities"]) == pytest.approx(1)


def test_ids_without_a_token_are_ignored(tokenizer: Tokenizer) -> None:
    scores = torch.zeros(tokenizer.size + 2)
    scores[-1], scores[7] = 5, 4
    first, second = likely_tokens(scores, tokenizer, 2)
    assert first["token"] == tokenizer.name(7)
    assert second["token"] == tokenizer.name(0)
    assert first["probability"] == pytest.approx(scores.softmax(0)[7].item())
    assert len(likely_tokens(scores, tokenizer, 10**6)) == tokenizer.size
    assert mask_name(tokenizer) == "[MASK]"


def test_equal_scores_are_ordered_by_id(tokenizer: Tokenizer) -> None:
    tokens = likely_tokens(torch.zeros(tokenizer.size), tokenizer, 9)
    assert [token["token"] for token in tokens] == [tokenizer.name(number) for number in range(9)]
