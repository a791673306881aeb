"""clean_text and split_sentences: compared with texts split by hand, and no character may get lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heedful.data.corpus.sentence_split import MAX_SEGMENT_CHARS, clean_text, split_sentences

SPLIT_BY_HAND = [  # a bar marks where one sentence ends and the next begins
    "One.| Two.| Three.",
    "Is it?| Yes!| No.",
    "A lonely text without an end",
    "It stops.",
    "She said so! and left.",
    "He paid 3.5 million, or 1,000.50 euros.| She paid 2.",
    "Version 2.0.1 is out.| 3 came later.",
    "Mr. Smith met Mrs. Jones and Dr. No in St. Ives.| They ate.",
    "Prof. J. R. Smith came.| He sat.",
    "J. S. Bach wrote it.| W. A. Mozart did not.",
    "He lives in the U.S. Navy yard.",
    "He left the U.S.| In 1999 he came back.",
    "The U.K. government fell.",
    "It costs, e.g. Five pounds, i.e. Much.",
    "See No. 5 and Fig. 3 on p. 12.| Then go.",
    "Is it so?| No.| It is not.",
    "The answer is no.| It was never yes.",
    "On Jan. 5 he left.",
    "It began in Jan.| The end came in Feb. Smith knew.",
    "He works at Smith Inc. Nobody knows.",
    "He works at Smith Inc.| The firm is old.",
    "Apples, pears, etc.| They were ripe.",
    "At 5 p.m. Monday it rained.| At 6 a.m.| It stopped.",
    "He has a Ph.D. from Oxford.",
    "“Why?” she asked.| “Because,” he said.",
    "“Go!”| He went.",
    '"Stop."| "Never!"| They ran.',
    "(It was late.)| He slept.",
    "He slept (it was late).| She did not.",
    "He saw it [1].| She did not.",
    "Wait... what?| Nothing...| Then it came.",
    "Well… maybe.| Well…| Maybe.",
    "What?!| No!!| Yes.",
    "He left.| – Nobody came.",
    "He left.| 42 came.",
    "He left.| “And then?”",
    "He left.| ¿Qué pasa?| ¡Nada!",
    "Er ging.| Ärger kam.| Ça va?| Été.",
    "Он ушёл.| Она нет.",
    "今日は晴れ。|明日は雨！|本当？|はい",
    "“好。”|他说。|今天！",
    "全角．終わり。| 次の文。",
    "1. First things.| 2. Second things.",
    "a. First things.",
    "It was 1990.| Then came 1991.",
    "See www.example.org now.| Visit example.com.| Done.",
    "I am.|\n\nYou are.| She is.|\n\nWe",
    "Professional career.|\n\nHe played.",
    "Dr.|\n\nNo",
]


@pytest.mark.parametrize("marked", SPLIT_BY_HAND)
def test_sentences_split_by_hand(marked: str) -> None:
    sentences, begins_paragraph = split_sentences(marked.replace("|", ""))
    assert sentences == marked.split("|")
    expected = [index == 0 or sentence.startswith("\n") for index, sentence in enumerate(sentences)]
    assert begins_paragraph == expected


def test_lines_are_sentences_as_they_stand() -> None:
    assert split_sentences("One. Two.\nthree\nDr.\nNo", lines=True) == (
        ["One. Two.", "\nthree", "\nDr.", "\nNo"],
        [True, False, False, False],
    )
    assert split_sentences("") == ([], [])


def test_an_overlong_sentence_is_cut_at_a_space() -> None:
    text = "word " * (MAX_SEGMENT_CHARS // 2) + "x" * (MAX_SEGMENT_CHARS + 5)
    sentences, begins_paragraph = split_sentences(text)
    assert "".join(sentences) == text
    assert max(map(len, sentences)) == MAX_SEGMENT_CHARS and len(sentences) == 4
    assert begins_paragraph == [True] + [False] * 3
    assert all(sentence.startswith((" ", "word", "x")) for sentence in sentences)


@pytest.mark.parametrize("unit", [".", "(", ". (", "e.g. ", "A. ", "a.", "\n", "。", "1. ", '."', ". ", "x\n\n", "… "])
def test_repetitive_texts_are_split_in_linear_time(unit: str) -> None:
    text = clean_text(unit * (50_000 // len(unit)))
    assert "".join(split_sentences(text)[0]) == text
    assert split_sentences(text + " (")[0]


@given(st.text(alphabet='aAé.!?… \n"”([1。好J', max_size=80), st.booleans())
def test_nothing_is_lost(raw: str, lines: bool) -> None:
    text = clean_text(raw, lines=lines)
    assert clean_text(text, lines=lines) == text
    sentences, begins_paragraph = split_sentences(text, lines=lines)
    assert "".join(sentences) == text
    assert all(sentence.strip() for sentence in sentences)
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph]
    assert sum(begins_paragraph) == len(paragraphs)
    for previous, sentence in pairwise(sentences):
        assert sentence[0] in " \n" or previous[-1] in "。”"


@given(st.text(max_size=60), st.booleans())
def test_normalising_again_changes_nothing(raw: str, lines: bool) -> None:
    text = clean_text(raw, lines=lines)
    assert clean_text(text, lines=lines) == text
    assert "".join(split_sentences(text, lines=lines)[0]) == text


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("", ""),
        (" \n\t ", ""),
        ("a  b\tc\u00a0d\u3000e", "a b c d e"),
        ("one\ntwo\r\nthree\rfour", "one two three four"),
        ("one\n\ntwo\n \n\n\nthree\r\n\r\nfour\r\rfive", "one\n\ntwo\n\nthree\n\nfour\n\nfive"),
        ("a\x00b\x07c\ufeffd\x9fe\x7f", "abcde"),
        ("a\u2028b\u2029c\x85d\x0be", "a b\n\nc d e"),
        ("half \ud800 a character", "half a character"),
        ("e\u0301 e\x00\u0301 \u212b", "é é Å"),
        ("ﬁ ½ 𝒜", "ﬁ ½ 𝒜"),  # NFC, not NFKC
    ],
)
def test_normalised_by_hand(raw: str, clean: str) -> None:
    assert clean_text(raw) == clean


def test_lines_stay_lines() -> None:
    assert clean_text(" One.  x\r\n\n\nTwo.\n ", lines=True) == "One. x\nTwo."
