"""Cleaning of documents, and rules that split them into sentences and paragraphs without losing a character.

The rules know English abbreviations. After an abbreviation, a sentence ends only before a word that often begins
sentences, so "He works at Smith Inc. Next year he retires" is one sentence. Sentences without a capital letter and
abbreviations of other languages are not recognised. In scripts without spaces only the marks 。！？｡ end a sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

MAX_SEGMENT_CHARS = 10_000  # maximum characters of a sentence; a longer one is cut at a space, or anywhere
_NEEDS_CLEANING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_LINE_END = re.compile("\r\n?|[\x0b\x0c\x85\u2028]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ud800-\udfff]")
_BLANK_LINES = re.compile(r"\n\s*\n")


def clean_text(text: str, *, lines: bool = False) -> str:
    r"""Normalise a text: NFC, no control characters, single spaces, paragraphs separated by "\n\n".

    Args:
        text: the document.
        lines: whether each line is a sentence. Lines are then separated by "\n", and there are no paragraphs. If false,
            a single line end becomes a space.

    >>> clean_text("One  line\r\nand another.\n \n\nNext"), clean_text("One.\r\n\nTwo.", lines=True)
    ('One line and another.\n\nNext', 'One.\nTwo.')
    """
    if not text.replace("\n", " ").isprintable() and _NEEDS_CLEANING.search(text):  # isprintable is faster than search
        text = _CONTROL.sub("", _LINE_END.sub("\n", text).replace("\u2029", "\n\n"))
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    parts = text.split("\n") if lines else _BLANK_LINES.split(text)
    return ("\n" if lines else "\n\n").join(filter(None, (" ".join(part.split()) for part in parts)))


# ---------------------------------------------------------------------------------------------------- sentences

_OPENING = "\"'“‘«([{¿¡"
_OPENING_MARKS, _STARTING_SIGNS = frozenset(_OPENING), frozenset("–—…#$€£•*")
_SENTENCE_END = re.compile(
    r"[.!?…‽。！？｡]{1,20}[\"'”’»)\]}」』）》】]{0,20}"  # bounded repeats, so that long runs take linear time
    r"(?= [\"'“‘«(\[{¿¡]{0,20}[^\sa-z]"  # followed by a space, and not by a lower-case letter
    r"|(?<=[。！？｡”’」』）》】])[^ ])"  # marks of scripts without spaces need no space
)


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NEVER_LAST = _word_set(  # abbreviations that never end a sentence
    "mr mrs ms mx dr prof st mt ft gen col maj capt cmdr lt sgt cpl adm rev fr hon gov sen rep pres supt messrs mme "
    "mlle e.g i.e eg ie vs v viz cf al approx est ed eds trans repr ser dept univ assn"
)
_BEFORE_NUMBERS = _word_set(  # abbreviations that do not end a sentence before a number
    "no nos nr vol vols p pp pg fig figs sec secs art arts ch chap chs eq eqs ca c op cap par pt pts ex n b d r fl "
    "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat sun"
)
_AMBIGUOUS = _word_set(  # abbreviations that may end a sentence, as the next word decides
    "jr sr esq etc inc ltd co corp bros plc ave blvd rd min max dist jan feb mar apr jun jul aug sep sept oct nov dec "
    "ph.d m.d b.a m.a a.m p.m"
)
_SENTENCE_STARTERS = _word_set(  # capitalised words that mostly begin sentences
    "The A An He She It They We I You In On At But And Or So Yet This That These Those His Her Its Their Our My Your "
    "There Here When While After Before Since Until Although Though Because However Moreover Then Thus If As For By "
    "With From During Despite Under Among Between Each Every Some Many Most Several Few All Both No Not Nor Now Once "
    "Only Who What Where Why How Which Another Other Such Later Today According"
)
_MAX_ABBREVIATION_CHARS = max(map(len, _NEVER_LAST | _BEFORE_NUMBERS | _AMBIGUOUS))
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?(?!\.)")


def split_sentences(text: str, *, lines: bool = False) -> tuple[list[str], list[bool]]:
    r"""Split a clean document into sentences.

    The sentences join to exactly the document: white space belongs to the sentence after it.

    Args:
        text: the document.
        lines: whether each line is a sentence, and all lines are one paragraph.

    Returns:
        The sentences, and whether each begins a paragraph.

    >>> split_sentences("Dr. No left at 5 p.m. on Monday. “Why?” asked J. Bond.\n\nNobody knew.")
    (['Dr. No left at 5 p.m. on Monday.', ' “Why?” asked J. Bond.', '\n\nNobody knew.'], [True, False, True])
    """
    sentences: list[str] = []
    begins: list[bool] = []
    start, begins_paragraph = 0, True
    for end, next_begins_paragraph in _sentence_ends(text, lines):
        if end - start <= MAX_SEGMENT_CHARS:
            sentences.append(text[start:end])
            begins.append(begins_paragraph)
        else:
            pieces = _cut_long_segment(text[start:end])
            sentences += pieces
            begins += [begins_paragraph] + [False] * (len(pieces) - 1)
        start, begins_paragraph = end, next_begins_paragraph
    return sentences, begins


def _sentence_ends(text: str, lines: bool) -> Iterator[tuple[int, bool]]:
    """Yield (offset of a sentence's end, whether a paragraph begins there), up to the end of the text."""
    start = 0  # offset of the beginning of the sentence
    num_newlines = 0  # line ends at the beginning of the sentence
    while text:
        line_end = text.find("\n", start + num_newlines)
        num_newlines = 1 if lines else 2
        line_end = len(text) if line_end < 0 else line_end
        if not lines:
            for match in _SENTENCE_END.finditer(text, start, line_end):
                mark, end = match.span()
                if _ends_sentence(text, start, mark, end):
                    yield end, False
                    start = end
        yield line_end, not lines
        if line_end == len(text):
            return
        start = line_end


def _ends_sentence(text: str, start: int, mark: int, end: int) -> bool:
    """Whether the punctuation in text[mark:end], after which more text follows, ends the sentence from `start`."""
    if text[mark] in "。！？｡":
        return True
    if text[end] != " ":
        return False
    next_start = end + 1
    while text[next_start : next_start + 1] in _OPENING_MARKS:
        next_start += 1
    next_character = text[next_start : next_start + 1]
    if not next_character.isalnum():
        return next_character in _STARTING_SIGNS and text[mark] != "…"
    if next_character.islower():
        return False
    if text[mark] != "." or text[mark + 1] in ".!?…‽":  # after several dots, a capital letter is enough
        return True
    word = text[max(text.rfind(" ", start, mark) + 1, start) : mark].strip().lstrip(_OPENING)
    if len(word) > _MAX_ABBREVIATION_CHARS and "." not in word and "\n" not in word:
        return True
    return _dot_ends_sentence(text[max(start, mark - 40) : mark], word, text[next_start : next_start + 40])


def _dot_ends_sentence(before: str, word: str, after: str) -> bool:
    """Whether a dot after a word that may be an abbreviation, an initial or a number ends the sentence.

    Args:
        before: the last 40 characters of the sentence before the dot.
        word: the last word before the dot.
        after: the text after the dot, beginning with a letter or digit.
    """
    lower = word.casefold()
    if lower in _NEVER_LAST or (after[0].isdigit() and lower in _BEFORE_NUMBERS):
        return False
    if (lower.isdigit() or len(lower) == 1) and before.strip(" \n" + _OPENING) == word:
        return False  # the number of a list item: "1. First"
    is_initial = len(word) == 1 and word.isupper()
    are_initials = "." in word and len(max(word.split("."), key=len)) == 1
    if is_initial or are_initials or lower in _AMBIGUOUS:
        next_word = _WORD.match(after)
        return next_word is not None and next_word[0] in _SENTENCE_STARTERS
    return True


def _cut_long_segment(text: str) -> list[str]:
    """Cut a sentence that is too long into pieces, before a space if the second half of a piece has one."""
    pieces = []
    while len(text) > MAX_SEGMENT_CHARS:
        cut = text.rfind(" ", 1, MAX_SEGMENT_CHARS + 1)
        cut = cut if cut > MAX_SEGMENT_CHARS // 2 else MAX_SEGMENT_CHARS
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]
