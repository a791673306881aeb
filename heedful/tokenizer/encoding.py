"""Encodings, their truncation and windows: arithmetic on tokens, without calls of the `tokenizers` library.

`Tokenizer` makes an `Encoding` of each text, and truncates it or cuts it into windows with these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tokenizers import Encoding as LibraryEncoding

from heedful.errors import TokenizerError, did_you_mean

Truncate = Literal["error", "longest_first", "only_second"]
T = TypeVar("T")
TOKEN_FIELDS = ("ids", "types", "segments", "offsets", "words")  # fields of Encoding with an entry for each token
# field of Encoding to attribute of the library's encoding
LAZY_FIELDS = {"segments": "sequence_ids", "offsets": "offsets", "words": "word_ids"}
TRUNCATES: tuple[Truncate, ...] = ("error", "longest_first", "only_second")


@dataclass(frozen=True, slots=True)
class PreTokenized:
    """A text that is already split into words, as for token classification; offsets count inside each word."""

    words: Sequence[str]


TokenizerInput = str | tuple[str, str] | PreTokenized  # a text, a pair of texts, or the words of one text


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """The tokens of a text or pair; every tuple has an entry for each token.

    Special tokens around the texts have segment None, word None and offset (0, 0). An encoding of the `tokenizers`
    library converts its segments, offsets and words at their first use: vectors and labels of texts need none of them.
    """

    ids: tuple[int, ...]
    types: tuple[int, ...]  # ids of the token-type embedding
    segments: tuple[int | None, ...]  # 0: the first text, 1: the second
    offsets: tuple[tuple[int, int], ...]  # start and stop in characters of the original text, or of the word
    words: tuple[int | None, ...]  # index of the word in its text, as PreTokenized or the tokenizer splits it
    dropped: int = 0  # tokens of the texts that were cut off
    start: int = 0  # tokens before this window in the windowed text, which is the second text of a pair
    first_text_start: int = 0  # tokens before this window in the first text of a pair, if that is windowed too
    _library: LibraryEncoding | None = field(default=None, init=False, repr=False, compare=False)

    if not TYPE_CHECKING:  # a type checker would allow any attribute

        def __getattr__(self, name: str) -> Any:
            """Convert a field that `Encoding.lazy` left out. Python calls this for attributes without a value."""
            if name not in LAZY_FIELDS:
                raise AttributeError(f"Encoding has no attribute {name!r}")
            values = tuple(getattr(self._library, LAZY_FIELDS[name]))
            object.__setattr__(self, name, values)
            return values

    def __reduce__(self) -> Any:
        """Pickle and copy the tokens without the library's encoding."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}
        return partial(Encoding, **values), ()

    @classmethod
    def lazy(cls, encoding: LibraryEncoding) -> Encoding:
        """Return all tokens of a library's encoding. Ids and types are converted now, other fields at first use."""
        values = {
            "ids": tuple(encoding.ids),
            "types": tuple(encoding.type_ids),
            "dropped": 0,
            "start": 0,
            "first_text_start": 0,
            "_library": encoding,
        }
        result = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(result, name, value)  # the class is frozen
        return result

    def __len__(self) -> int:
        """Return how many tokens there are, special ones included."""
        return len(self.ids)

    @property
    def special(self) -> tuple[bool, ...]:
        """Whether each token is special."""
        return tuple(segment is None for segment in self.segments)

    def until(self, stop: int) -> Encoding:
        """Return the first `stop` tokens."""
        return replace(self, **{name: getattr(self, name)[:stop] for name in TOKEN_FIELDS})

    def without(self, positions: Sequence[int]) -> Encoding:
        """Return the encoding without the tokens at some positions."""
        removed = set(positions)
        remaining = [position for position in range(len(self)) if position not in removed]
        fields: dict[str, Any] = {name: select_entries(getattr(self, name), remaining) for name in TOKEN_FIELDS}
        return replace(self, **fields)


def count_tokens(encoding: LibraryEncoding) -> tuple[int, int, int]:
    """Return how many tokens the first text has, how many the second text has, and how many are special."""
    segments = encoding.sequence_ids
    first, second = segments.count(0), segments.count(1)
    return first, second, len(segments) - first - second


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each text remain if the longer text always loses the next token.

    The result is that of the `tokenizers` library: if both texts are cut and `room` is odd, the text that was longer
    has one token more, or the second text if they were equally long. Google's BERT cuts token by token and leaves the
    first text longer, so that results differ by one token.

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
    """Return how many tokens of the first and of the second text fit in max_length beside all special tokens.

    Args:
        lengths: Token counts of the first text, of the second text, and of special tokens.
        max_length: Maximum number of tokens.
        truncate: Which text is cut.
        what: Name of the item in messages.

    Raises:
        TokenizerError: If tokens may not be cut, or no token of a text would remain.
    """
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
    """Return the starts of windows of `room` tokens that cover `length` tokens, without superfluous windows.

    >>> window_starts(10, 4, 3), window_starts(4, 4, 3), window_starts(0, 4, 3)
    ([0, 3, 6], [0], [0])
    """
    starts = [0]
    while starts[-1] + room < length:
        starts.append(starts[-1] + min(room, stride))
    return starts


def cut_windows(encoding: Encoding, *, segment: int, max_length: int, stride: int | None = None) -> list[Encoding]:
    """Cut one text of an encoding into windows; all other tokens are in each window.

    Args:
        encoding: The encoding.
        segment: Index of the text that is cut, 0 or 1.
        max_length: Maximum number of tokens in a window.
        stride: Tokens of the text between the starts of two windows. If None, half of the text's tokens in a window.

    Raises:
        TokenizerError: If the other tokens leave no space for the text.
    """
    count = encoding.segments.count(segment)
    fixed = len(encoding) - count
    room = max_length - fixed
    if room < 1:
        special = sum(encoding.special)
        first_text = f" and {fixed - special} of the first text" if segment else ""
        raise TokenizerError(
            f"max_length {max_length} leaves no room to window: {special} special tokens{first_text} are in every "
            "window; raise max_length or shorten the first text"
        )
    starts = window_starts(count, room, max(1, room // 2) if stride is None else stride)
    return [window_at(encoding, segment=segment, start=start, room=room) for start in starts]


def pair_windows(encoding: Encoding, max_length: int) -> list[Encoding]:
    """Cut a pair into windows of at most max_length tokens that overlap by half.

    A text that needs at most half of the space for texts is complete in each window. If both texts need more, each
    window of the first text, with half of the space, is combined with all windows of the second text.
    """
    room = max_length - sum(encoding.special)
    second_length = encoding.segments.count(1)
    first_windows = [encoding]
    if encoding.segments.count(0) > room // 2:
        room_of_second = min(second_length, room - room // 2)
        windows = cut_windows(encoding, segment=0, max_length=max_length + second_length - room_of_second)
        first_windows = [replace(window, start=0, first_text_start=window.start) for window in windows]
    all_windows: list[Encoding] = []
    for window in first_windows:
        if len(window) <= max_length:
            all_windows.append(window)
        else:
            all_windows += cut_windows(window, segment=1, max_length=max_length)
    return all_windows


def window_at(encoding: Encoding, *, segment: int, start: int, room: int) -> Encoding:
    """Return a window: `room` tokens of one text from its token `start` on, and all tokens outside of this text."""
    text_start, text_stop = 0, 0  # positions of the text in the encoding
    if segment in encoding.segments:  # searched from both ends: a long text has many windows
        text_start = encoding.segments.index(segment)
        text_stop = len(encoding)
        while encoding.segments[text_stop - 1] != segment:
            text_stop -= 1
    begin = min(text_start + start, text_stop)
    end = min(text_start + start + room, text_stop)
    fields = {}
    for name in TOKEN_FIELDS:
        entries = getattr(encoding, name)
        fields[name] = entries[:text_start] + entries[begin:end] + entries[text_stop:]
    return replace(encoding, **fields, start=start)


def kept_positions(encoding: LibraryEncoding, stops: tuple[int, int]) -> list[int]:
    """Return the positions of special tokens, and of the first `stops[segment]` tokens of each text."""
    positions = []
    counts = [0, 0]  # tokens of each text so far
    for position, segment in enumerate(encoding.sequence_ids):
        if segment is None:
            positions.append(position)
            continue
        if counts[segment] < stops[segment]:
            positions.append(position)
        counts[segment] += 1
    return positions


def select_entries(entries: list[T], positions: list[int] | None) -> tuple[T, ...]:
    """Return the entries at some positions, or all entries if `positions` is None."""
    return tuple(entries) if positions is None else tuple([entries[position] for position in positions])


def from_library(encoding: LibraryEncoding, positions: list[int] | None = None, *, dropped: int = 0) -> Encoding:
    """Return the tokens of a library's encoding at some positions.

    Args:
        encoding: The encoding of the `tokenizers` library.
        positions: Positions of the tokens to keep. If None, all.
        dropped: How many tokens of the texts are cut off.
    """
    if positions is None:
        return Encoding.lazy(encoding)
    return Encoding(
        ids=select_entries(encoding.ids, positions),
        types=select_entries(encoding.type_ids, positions),
        segments=select_entries(encoding.sequence_ids, positions),
        offsets=select_entries(encoding.offsets, positions),
        words=select_entries(encoding.word_ids, positions),
        dropped=dropped,
    )


def check_limits(*, max_length: int | None, truncate: Truncate) -> None:
    """Raise TokenizerError for invalid limits of an encoding."""
    if truncate not in TRUNCATES:
        hint = did_you_mean(str(truncate), list(TRUNCATES))
        raise TokenizerError(f"truncate is {truncate!r}{hint}: use one of {', '.join(TRUNCATES)}")
    if max_length is None:
        if truncate != "error":
            raise TokenizerError(f"truncate={truncate!r} needs max_length: give the number of tokens to keep")
    elif isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise TokenizerError(f"max_length is {max_length!r}: give a number of tokens from 1, or None for no limit")
