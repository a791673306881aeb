"""What every task shares: an input becomes windows of tokens, and the head's scores become plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.config import Head
from heedful.model.decode import Decoding
from heedful.packed import Packed
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput
from heedful.tokenizer.encoding import cut_windows, pair_windows

if TYPE_CHECKING:
    from heedful.tasks.generation import GenerationConfig
    from heedful.tasks.predictions import Prediction

Answer = dict[str, Any]  # plain data: text, numbers, lists and dicts of them
TokenPosition = tuple[int, int]  # the number of a window, and a place in it
StartGeneration = Callable[[ModelBundle, Tokenizer, Packed, Any], Decoding]


class Window(NamedTuple):
    """Tokens that the model saw at once, and what the head said of them."""

    encoded: Encoding
    positions: Sequence[int]  # the tokens that were scored; none: the window was scored as a whole
    scores: Any  # a tensor [places, ...], or of the whole window [...]; or what was written for it


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerContext:
    """What an answer needs to know beside the scores."""

    tokenizer: Tokenizer
    head: Head
    top_k: int  # candidates that are listed
    thresholds: Mapping[str, float] = field(default_factory=dict)  # what was calibrated or set, by name
    windows: Sequence[Encoding] = ()  # all windows of the input, those in which nothing was scored among them


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHead:
    """How a head's scores answer an input."""

    expects: str  # the form of an input, in words
    tokenizer_inputs: Callable[
        [Any], list[TokenizerInput] | None
    ]  # what the tokenizer reads; None: the input has another form
    answer: Callable[[Any, list[Window], AnswerContext], Answer]
    positions: Callable[[list[Encoding], Tokenizer], list[TokenPosition]] | None = (
        None  # the tokens to score; None: whole windows
    )
    long_inputs: Literal["stride", "truncate", "refuse"] = "stride"  # what to do with more tokens than the model reads
    windows: Callable[[list[Encoding], int | None], list[list[Encoding]]] | None = None  # of items that go together
    generate: StartGeneration | None = None  # texts; None: the head's scores answer
    summarize: Callable[[Any, AnswerContext], list[Any]] | None = (
        None  # what is kept of the scores of places; None: all of them
    )
    prediction: Callable[[Answer], Prediction]  # the typed form of an answer
    columns: Callable[
        [ModelBundle, GenerationConfig], dict[str, Any]
    ]  # type of each field: str, [float], {"name": str}
    pairs: bool | None = None  # True: answers pairs of texts only; False: single texts only; None: either


def read_text(given: Any) -> list[TokenizerInput] | None:
    """One text."""
    return [given] if isinstance(given, str) else None


def read_pair(given: Any) -> list[TokenizerInput] | None:
    """Two texts, in a tuple or a list."""
    match given:
        case (str() as first, str() as second):
            return [(first, second)]
    return None


def split_windows(item: TokenizerInput, encoded: Encoding, limit: int | None) -> list[Encoding]:
    """The text in windows that overlap by half; of a pair as `pair_windows` cuts it."""
    if limit is None or len(encoded) <= limit:
        return [encoded]
    if isinstance(item, tuple):
        return pair_windows(encoded, limit)
    return cut_windows(encoded, segment=0, max_length=limit)


def input_windows(
    answerer: AnswerHead, items: list[TokenizerInput], encoded: list[Encoding], limit: int | None
) -> list[list[Encoding]]:
    """The windows of each of the items of one input."""
    if answerer.long_inputs == "truncate":
        return [[each] for each in encoded]
    if answerer.long_inputs == "refuse" and limit is not None and max(map(len, encoded)) > limit:
        longest = max(map(len, encoded))
        raise HeedfulError(
            f"it has {longest} tokens, but this model reads {limit}, and its answer needs all of them at once: "
            f"shorten it by {longest - limit} tokens"
        )
    if answerer.windows is not None:
        return answerer.windows(encoded, limit)
    return [split_windows(item, each, limit) for item, each in zip(items, encoded, strict=True)]


def best_context_positions(windows: Sequence[Encoding], segment: int = 0) -> list[TokenPosition]:
    """For each token of the windowed text in order, the place where it sees most around it, beside each first text.

    That is the largest min(tokens on its left, tokens on its right) + 0.01 tokens of the window, and the first window
    among equals (Devlin et al. 2019, the published code for SQuAD).
    """
    best: dict[tuple[int, int], tuple[float, TokenPosition]] = {}
    for number, window in enumerate(windows):
        places = [place for place, of in enumerate(window.segments) if of == segment]
        for index, place in enumerate(places):
            context = min(index, len(places) - 1 - index) + 0.01 * len(places)
            token = window.beside, window.start + index
            if context > best.get(token, (-1.0,))[0]:
                best[token] = context, (number, place)
    return [place for _, place in best.values()]


def strip_span(text: str, start: int, stop: int) -> tuple[int, int]:
    """The same span without white space at its ends.

    >>> strip_span("a  b ", 1, 5)
    (3, 4)
    """
    part = text[start:stop]
    kept = len(part.strip())
    start += len(part) - len(part.lstrip()) if kept else 0
    return start, start + kept


def unique_label_names(labels: Sequence[str]) -> list[str]:
    """The labels, told apart by their numbers where two are called the same.

    >>> unique_label_names(["good", "bad"]), unique_label_names(["x", "x"])
    (['good', 'bad'], ['x/0', 'x/1'])
    """
    if len(set(labels)) == len(labels):
        return list(labels)
    return [f"{label}/{number}" for number, label in enumerate(labels)]


def dict_values(given: Any, *keys: str) -> list[Any] | None:
    """The values of a dict that has exactly these keys."""
    if not isinstance(given, dict) or set(given) != set(keys):
        return None
    return [given[key] for key in keys]


def group_by_window(places: Iterable[TokenPosition], count: int) -> list[list[int]]:
    """The places of each of so many windows."""
    found: list[list[int]] = [[] for _ in range(count)]
    for number, place in places:
        found[number].append(place)
    return found


def require_tokenizer(loaded: ModelBundle) -> Tokenizer:
    """The tokenizer, without which no text can be read."""
    if loaded.tokenizer is None:
        raise HeedfulError(
            f"{loaded.source} has no tokenizer: put its tokenizer.json, or vocab.txt, beside config.json"
        )
    return loaded.tokenizer
