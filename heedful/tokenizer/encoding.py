"""Encodings, truncation and windows: arithmetic on tokens, without calls of the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from tokenizers import Encoding as LibraryEncoding

from heedful.errors import TokenizerError, did_you_mean

Truncate = Literal["error", "longest_first", "only_second"]
T = TypeVar("T")
COLUMNS = ("ids", "types", "segments", "offsets", "words")  # of Encoded, with one entry for each token
TRUNCATES: tuple[Truncate, ...] = ("error", "longest_first", "only_second")


@dataclass(frozen=True, slots=True)
class PreTokenized:
    """A text that is already split into words, as for tagging: offsets then count inside each word."""

    words: Sequence[str]


TokenizerInput = str | tuple[str, str] | PreTokenized  # a text, a pair of texts, or the words of one text


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """The tokens of one text or pair; every tuple has one entry for each token.

    Special tokens around the texts have segment None, word None and offset (0, 0).
    """

    ids: tuple[int, ...]
    types: tuple[int, ...]  # input of the token-type embedding
    segments: tuple[int | None, ...]  # 0: the first text, 1: the second
    offsets: tuple[tuple[int, int], ...]  # start and stop in characters of the token's own original text (or word)
    words: tuple[
        int | None, ...
    ]  # number of the word in its text: that of PreTokenized, else as the tokenizer splits it
    dropped: int = 0  # tokens of the texts that did not fit, and are in no window
    start: int = 0  # tokens of the windowed text before a window; of a pair, of the second text
    first_text_start: int = 0  # tokens of a pair's first text before a window, if that is windowed too

    def __len__(self) -> int:
        """Number of tokens, special ones included."""
        return len(self.ids)

    @property
    def special(self) -> tuple[bool, ...]:
        """Whether each token is special."""
        return tuple(segment is None for segment in self.segments)

    def until(self, stop: int) -> Encoding:
        """Return the first `stop` tokens."""
        return replace(self, **{name: getattr(self, name)[:stop] for name in COLUMNS})

    def without(self, places: Sequence[int]) -> Encoding:
        """Return the encoding without the tokens at those positions."""
        gone = set(places)
        positions = [place for place in range(len(self)) if place not in gone]
        columns: dict[str, Any] = {name: select_entries(getattr(self, name), positions) for name in COLUMNS}
        return replace(self, **columns)


def count_tokens(encoding: LibraryEncoding) -> tuple[int, int, int]:
    """Return the numbers of tokens of the first text and of the second, and of special tokens."""
    segments = encoding.sequence_ids
    first, second = segments.count(0), segments.count(1)
    return first, second, len(segments) - first - second


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text stay when the longer one always loses the next token.

    Equal to the `tokenizers` library: when both are cut to half and the room is odd, the text that was longer has
    one more, and the second one when they were equally long. (Google's BERT cuts token by token and then leaves the
    first one longer; the two differ by that one token.)

    >>> longest_first(3, 20, 10), longest_first(9, 20, 9), longest_first(20, 9, 9)
    ((3, 7), (4, 5), (5, 4))
    """
    if first + second <= room:
        return first, second
    shorter, longer = sorted((first, second))
    if 2 * shorter <= room:
        longer = room - shorter
    else:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)


def tokens_to_keep(lengths: tuple[int, int, int], *, max_length: int, truncate: Truncate, what: str) -> tuple[int, int]:
    """How many tokens of the first and second text stay within max_length, special tokens being kept always."""
    first, second, special = lengths
    room = max_length - special
    if first + second <= room:
        return first, second
    if truncate == "error":
        raise TokenizerError(
            f"{what} has {sum(lengths)} tokens but max_length is {max_length}: cut it with "
            'truncate="longest_first", or read all of it with Tokenizer.windows'
        )
    if room < 1:
        raise TokenizerError(
            f"max_length {max_length} leaves no token of {what}: {special} special tokens go around it"
        )
    if truncate == "longest_first":
        return longest_first(first, second, room)
    if second == 0:
        raise TokenizerError(
            f'truncate="only_second" needs a pair, but {what} is one text: use truncate="longest_first"'
        )
    if room - first < 1:
        raise TokenizerError(
            f"the first text of {what} alone has {first} tokens, and max_length {max_length} less {special} special "
            f'tokens leaves {room}: nothing of the second text would stay; use truncate="longest_first"'
        )
    return first, room - first


def window_starts(length: int, room: int, stride: int) -> list[int]:
    """Where windows of `room` tokens start so that they cover `length` tokens and no window is there in vain.

    >>> window_starts(10, 4, 3), window_starts(4, 4, 3), window_starts(0, 4, 3)
    ([0, 3, 6], [0], [0])
    """
    starts = [0]
    while starts[-1] + room < length:
        starts.append(starts[-1] + min(room, stride))
    return starts


def cut_windows(whole: Encoding, *, segment: int, max_length: int, stride: int | None = None) -> list[Encoding]:
    """The tokens in windows of at most max_length, of which one text (`segment`) is cut and all else is in each.

    `stride` is how many tokens of that text a window advances by; None: half of its room.
    """
    count = whole.segments.count(segment)
    fixed = len(whole) - count
    room = max_length - fixed
    if room < 1:
        special = sum(whole.special)
        raise TokenizerError(
            f"max_length {max_length} leaves no room to window: {special} special tokens"
            + (f" and {fixed - special} of the first text" if segment else "")
            + " are in every window; raise max_length or shorten the first text"
        )
    starts = window_starts(count, room, max(1, room // 2) if stride is None else stride)
    return [window_at(whole, segment=segment, start=start, room=room) for start in starts]


def pair_windows(whole: Encoding, max_length: int) -> list[Encoding]:
    """Return a pair in windows that overlap by half; a text of at most half of their room is whole in each of them.

    If both texts are longer, each window of the first, of half of the room, is combined with all windows of the second.
    """
    special = sum(whole.special)
    room, second = max_length - special, whole.segments.count(1)
    parts = [whole]
    if whole.segments.count(0) > room // 2:
        room_of_second = min(second, room - room // 2)
        windows = cut_windows(whole, segment=0, max_length=max_length + second - room_of_second)
        parts = [replace(window, start=0, first_text_start=window.start) for window in windows]
    return [
        window
        for part in parts
        for window in ([part] if len(part) <= max_length else cut_windows(part, segment=1, max_length=max_length))
    ]


def window_at(whole: Encoding, *, segment: int, start: int, room: int) -> Encoding:
    """Return `room` tokens of one text from its token `start` on, with all tokens outside that text."""
    first, last = 0, 0
    if segment in whole.segments:  # searched from both ends: a long text has many windows
        first, last = whole.segments.index(segment), len(whole)
        while whole.segments[last - 1] != segment:
            last -= 1
    low, high = min(first + start, last), min(first + start + room, last)
    columns = {name: getattr(whole, name) for name in COLUMNS}
    parts = {name: column[:first] + column[low:high] + column[last:] for name, column in columns.items()}
    return replace(whole, **parts, start=start)


def kept_positions(encoding: LibraryEncoding, stops: tuple[int, int]) -> list[int]:
    """Return the positions of special tokens, and of the first tokens of each text, up to its stop."""
    positions = []
    seen = [0, 0]
    for number, segment in enumerate(encoding.sequence_ids):
        if segment is None:
            positions.append(number)
            continue
        if seen[segment] < stops[segment]:
            positions.append(number)
        seen[segment] += 1
    return positions


def select_entries(column: list[T], positions: list[int] | None) -> tuple[T, ...]:
    """Return the entries at the positions; None: all."""
    return tuple(column) if positions is None else tuple([column[number] for number in positions])


def from_library(encoding: LibraryEncoding, positions: list[int] | None = None, *, dropped: int = 0) -> Encoding:
    """Return the tokens at the positions (None: all) of an encoding of the library."""
    return Encoding(
        ids=select_entries(encoding.ids, positions),
        types=select_entries(encoding.type_ids, positions),
        segments=select_entries(encoding.sequence_ids, positions),
        offsets=select_entries(encoding.offsets, positions),
        words=select_entries(encoding.word_ids, positions),
        dropped=dropped,
    )


def check_limits(*, max_length: int | None, truncate: Truncate) -> None:
    """Refuse invalid limits."""
    if truncate not in TRUNCATES:
        hint = did_you_mean(str(truncate), list(TRUNCATES))
        raise TokenizerError(f"truncate is {truncate!r}{hint}: use one of {', '.join(TRUNCATES)}")
    if max_length is None:
        if truncate != "error":
            raise TokenizerError(f"truncate={truncate!r} needs max_length: give the number of tokens to keep")
    elif isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise TokenizerError(f"max_length is {max_length!r}: give a number of tokens from 1, or None for no limit")
