"""Documents cleaned, and cut into sentences and paragraphs: by rules, fast, and so that nothing is lost.

The rules know the abbreviations of English. They do not know that a sentence may end in one ("He works at Smith Inc.
Next year he retires" is cut only before a word that often begins sentences), nor sentences without a capital letter,
nor the abbreviations of other languages; in scripts without spaces only the marks 。！？｡ end a sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

LONGEST_SEGMENT = 10_000  # characters; what has no end for so long is cut at a space, or anywhere
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_LINE = re.compile("\r\n?|[\x0b\x0c\x85\u2028]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufeff\ud800-\udfff]")
_BLANK = re.compile(r"\n\s*\n")


def clean_text(text: str, *, lines: bool = False) -> str:
    r"""The text in NFC, without control characters, runs of white space as one space, paragraphs parted by "\n\n".

    A lone line end is a space, unless the document is `lines`, which are parted by "\n" and have no paragraphs.

    >>> normalise("One  line\r\nand another.\n \n\nNext"), normalise("One.\r\n\nTwo.", lines=True)
    ('One line and another.\n\nNext', 'One.\nTwo.')
    """
    if not text.replace("\n", " ").isprintable() and _ODD.search(text):  # the former is faster, and mostly enough
        text = _CONTROL.sub("", _LINE.sub("\n", text).replace("\u2029", "\n\n"))
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    parts = text.split("\n") if lines else _BLANK.split(text)
    return ("\n" if lines else "\n\n").join(filter(None, (" ".join(part.split()) for part in parts)))


# ---------------------------------------------------------------------------------------------------- sentences

_OPENING = "\"'“‘«([{¿¡"
_OPENINGS, _SIGNS = frozenset(_OPENING), frozenset("–—…#$€£•*")
_END = re.compile(
    r"[.!?…‽。！？｡]{1,20}[\"'”’»)\]}」』）》】]{0,20}"  # bounds, for long runs of them not to take time without end
    r"(?= [\"'“‘«(\[{¿¡]{0,20}[^\sa-z]"  # a space must follow, and no small letter
    r"|(?<=[。！？｡”’」』）》】])[^ ])"  # after these, if they are marks of scripts without spaces, none need follow
)


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_NEVER = _set(  # what follows belongs to it
    "mr mrs ms mx dr prof st mt ft gen col maj capt cmdr lt sgt cpl adm rev fr hon gov sen rep pres supt messrs mme "
    "mlle e.g i.e eg ie vs v viz cf al approx est ed eds trans repr ser dept univ assn"
)
_NUMBERED = _set(  # what follows belongs to it where it is a number
    "no nos nr vol vols p pp pg fig figs sec secs art arts ch chap chs eq eqs ca c op cap par pt pts ex n b d r fl "
    "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat sun"
)
_MAYBE = _set(  # may stand inside a sentence, or end it: the next word decides
    "jr sr esq etc inc ltd co corp bros plc ave blvd rd min max dist jan feb mar apr jun jul aug sep sept oct nov dec "
    "ph.d m.d b.a m.a a.m p.m"
)
_STARTERS = _set(  # words that, with a capital, mostly begin sentences
    "The A An He She It They We I You In On At But And Or So Yet This That These Those His Her Its Their Our My Your "
    "There Here When While After Before Since Until Although Though Because However Moreover Then Thus If As For By "
    "With From During Despite Under Among Between Each Every Some Many Most Several Few All Both No Not Nor Now Once "
    "Only Who What Where Why How Which Another Other Such Later Today According"
)
LONGEST_SHORT = max(map(len, _NEVER | _NUMBERED | _MAYBE))
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)?(?!\.)")


def split_sentences(text: str, *, lines: bool = False) -> tuple[list[str], list[bool]]:
    r"""The sentences of a normalised document, and of each whether it begins a paragraph.

    They join to exactly the document: white space stands at the beginning of the sentence after it. In a document of
    `lines` each line is a sentence as it stands, and all are one paragraph.

    >>> segments("Dr. No left at 5 p.m. on Monday. “Why?” asked J. Bond.\n\nNobody knew.")
    (['Dr. No left at 5 p.m. on Monday.', ' “Why?” asked J. Bond.', '\n\nNobody knew.'], [True, False, True])
    """
    found: list[str] = []
    begins: list[bool] = []
    start, begin = 0, True
    for cut, paragraph in _cuts(text, lines):
        if cut - start <= LONGEST_SEGMENT:
            found.append(text[start:cut])
            begins.append(begin)
        else:
            pieces = _pieces(text[start:cut])
            found += pieces
            begins += [begin] + [False] * (len(pieces) - 1)
        start, begin = cut, paragraph
    return found, begins


def _cuts(text: str, lines: bool) -> Iterator[tuple[int, bool]]:
    """Where segments end, and whether a paragraph begins there; the last one is the end of the text."""
    start = skip = 0
    while text:
        stop = text.find("\n", start + skip)
        skip = 1 if lines else 2  # of those that begin the next part
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
    """Whether the mark between `mark` and `end` ends the sentence that began at `start`; something stands after it."""
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
    if text[mark] != "." or text[mark + 1] in ".!?…‽":  # after several dots the capital decides alone
        return True
    word = text[max(text.rfind(" ", start, mark) + 1, start) : mark].strip().lstrip(_OPENING)
    if len(word) > LONGEST_SHORT and "." not in word and "\n" not in word:
        return True
    return _dot_ends(text[max(start, mark - 40) : mark], word, text[next_ : next_ + 40])


def _dot_ends(before: str, word: str, after: str) -> bool:
    """The same of a dot behind a word that may be an abbreviation, an initial or a number."""
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
    """A segment that is too long, cut before its last space that leaves no more than the most."""
    found = []
    while len(text) > LONGEST_SEGMENT:
        cut = text.rfind(" ", 1, LONGEST_SEGMENT + 1)
        cut = cut if cut > LONGEST_SEGMENT // 2 else LONGEST_SEGMENT
        found.append(text[:cut])
        text = text[cut:]
    return [*found, text]
