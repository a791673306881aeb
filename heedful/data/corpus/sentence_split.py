"""Clean documents and split them into sentences and paragraphs by rules, without losing a character.

The rules know English abbreviations. Limits: after an abbreviation a sentence ends only before a word that often begins
sentences ("He works at Smith Inc. Next year he retires"); sentences without a capital letter and abbreviations of other
languages are not recognised; in scripts without spaces only the marks 。！？｡ end a sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

LONGEST_SEGMENT = 10_000  # characters; a longer segment is cut at a space, or anywhere
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_LINE = re.compile("\r\n?|[\x0b\x0c\x85\u2028]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ud800-\udfff]")
_BLANK = re.compile(r"\n\s*\n")


def clean_text(text: str, *, lines: bool = False) -> str:
    r"""Normalise a text: NFC, no control characters, single spaces, paragraphs separated by "\n\n".

    Args:
        text: the document.
        lines: whether each line is a sentence: lines are separated by "\n", without paragraphs. Otherwise a single line
            end is a space.

    >>> clean_text("One  line\r\nand another.\n \n\nNext"), clean_text("One.\r\n\nTwo.", lines=True)
    ('One line and another.\n\nNext', 'One.\nTwo.')
    """
    if not text.replace("\n", " ").isprintable() and _ODD.search(text):  # isprintable is faster, and mostly enough
        text = _CONTROL.sub("", _LINE.sub("\n", text).replace("\u2029", "\n\n"))
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    parts = text.split("\n") if lines else _BLANK.split(text)
    return ("\n" if lines else "\n\n").join(filter(None, (" ".join(part.split()) for part in parts)))


# ---------------------------------------------------------------------------------------------------- sentences

_OPENING = "\"'“‘«([{¿¡"
_OPENINGS, _SIGNS = frozenset(_OPENING), frozenset("–—…#$€£•*")
_END = re.compile(
    r"[.!?…‽。！？｡]{1,20}[\"'”’»)\]}」』）》】]{0,20}"  # bounded repeats, so that long runs take linear time
    r"(?= [\"'“‘«(\[{¿¡]{0,20}[^\sa-z]"  # followed by a space, and not by a lower-case letter
    r"|(?<=[。！？｡”’」』）》】])[^ ])"  # marks of scripts without spaces need no space
)


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NEVER = _set(  # never end a sentence
    "mr mrs ms mx dr prof st mt ft gen col maj capt cmdr lt sgt cpl adm rev fr hon gov sen rep pres supt messrs mme "
    "mlle e.g i.e eg ie vs v viz cf al approx est ed eds trans repr ser dept univ assn"
)
_NUMBERED = _set(  # do not end a sentence before a number
    "no nos nr vol vols p pp pg fig figs sec secs art arts ch chap chs eq eqs ca c op cap par pt pts ex n b d r fl "
    "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat sun"
)
_MAYBE = _set(  # may end a sentence: the next word decides
    "jr sr esq etc inc ltd co corp bros plc ave blvd rd min max dist jan feb mar apr jun jul aug sep sept oct nov dec "
    "ph.d m.d b.a m.a a.m p.m"
)
_STARTERS = _set(  # capitalised words that mostly begin sentences
    "The A An He She It They We I You In On At But And Or So Yet This That These Those His Her Its Their Our My Your "
    "There Here When While After Before Since Until Although Though Because However Moreover Then Thus If As For By "
    "With From During Despite Under Among Between Each Every Some Many Most Several Few All Both No Not Nor Now Once "
    "Only Who What Where Why How Which Another Other Such Later Today According"
)
LONGEST_SHORT = max(map(len, _NEVER | _NUMBERED | _MAYBE))
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?(?!\.)")


def split_sentences(text: str, *, lines: bool = False) -> tuple[list[str], list[bool]]:
    r"""Split a clean document into sentences; return them, and whether each begins a paragraph.

    The sentences join to exactly the document: white space belongs to the sentence after it. With `lines`, each line
    is a sentence, and all are one paragraph.

    >>> split_sentences("Dr. No left at 5 p.m. on Monday. “Why?” asked J. Bond.\n\nNobody knew.")
    (['Dr. No left at 5 p.m. on Monday.', ' “Why?” asked J. Bond.', '\n\nNobody knew.'], [True, False, True])
    """
    sentences: list[str] = []
    begins: list[bool] = []
    start, begin = 0, True
    for cut, paragraph in _cuts(text, lines):
        if cut - start <= LONGEST_SEGMENT:
            sentences.append(text[start:cut])
            begins.append(begin)
        else:
            pieces = _pieces(text[start:cut])
            sentences += pieces
            begins += [begin] + [False] * (len(pieces) - 1)
        start, begin = cut, paragraph
    return sentences, begins


def _cuts(text: str, lines: bool) -> Iterator[tuple[int, bool]]:
    """Yield (end of a segment, whether a paragraph begins there); the last one is the end of the text."""
    start = skip = 0
    while text:
        stop = text.find("\n", start + skip)
        skip = 1 if lines else 2  # line ends that begin the next segment
        stop = len(text) if stop < 0 else stop
        if not lines:
            for match in _END.finditer(text, start, stop):
                mark, end = match.span()
                if _ends(text, start, mark, end):
                    yield end, False
                    start = end
        yield stop, not lines
        if stop == len(text):
            return
        start = stop


def _ends(text: str, start: int, mark: int, end: int) -> bool:
    """Whether the punctuation in text[mark:end] ends the sentence that began at `start`; text follows it."""
    if text[mark] in "。！？｡":
        return True
    if text[end] != " ":
        return False
    next_ = end + 1
    while text[next_ : next_ + 1] in _OPENINGS:
        next_ += 1
    after = text[next_ : next_ + 1]
    if not after.isalnum():
        return after in _SIGNS and text[mark] != "…"
    if after.islower():
        return False
    if text[mark] != "." or text[mark + 1] in ".!?…‽":  # after several dots the capital letter decides
        return True
    word = text[max(text.rfind(" ", start, mark) + 1, start) : mark].strip().lstrip(_OPENING)
    if len(word) > LONGEST_SHORT and "." not in word and "\n" not in word:
        return True
    return _dot_ends(text[max(start, mark - 40) : mark], word, text[next_ : next_ + 40])


def _dot_ends(before: str, word: str, after: str) -> bool:
    """Whether a dot after a word that may be an abbreviation, an initial or a number ends the sentence."""
    bare = word.casefold()
    if bare in _NEVER or (after[0].isdigit() and bare in _NUMBERED):
        return False
    if (bare.isdigit() or len(bare) == 1) and before.strip(" \n" + _OPENING) == word:
        return False  # the number of an item: "1. First"
    initial = len(word) == 1 and word.isupper()
    if initial or bare in _MAYBE or ("." in word and len(max(word.split("."), key=len)) == 1):
        following = _WORD.match(after)
        return following is not None and following[0] in _STARTERS
    return True


def _pieces(text: str) -> list[str]:
    """Cut a segment that is too long, before a space if there is one in its second half."""
    pieces = []
    while len(text) > LONGEST_SEGMENT:
        cut = text.rfind(" ", 1, LONGEST_SEGMENT + 1)
        cut = cut if cut > LONGEST_SEGMENT // 2 else LONGEST_SEGMENT
        pieces.append(text[:cut])
        text = text[cut:]
    return [*pieces, text]
