"""Shared parts of answering: inputs become windows of tokens, and the head's scores become plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.config import Head
from heedful.model.decode import Decoding
from heedful.packed import Packed
from heedful.tasks.label_answers import Answer as Answer
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput
from heedful.tokenizer.encoding import cut_windows, pair_windows

if TYPE_CHECKING:
    from heedful.tasks.generation import GenerationConfig
    from heedful.tasks.predictions import Prediction

AnswerInputs = Callable[[list[object]], list[Answer]]  # an engine
TokenPosition = tuple[int, int]  # the number of a window, and a position in it
StartGeneration = Callable[[ModelBundle, Tokenizer, Packed, "GenerationConfig"], Decoding]


class Window(NamedTuple):
    """Tokens of one forward pass, and the head's outputs for them."""

    encoded: Encoding
    positions: Sequence[int]  # of the scored tokens; empty: the window was scored as a whole
    scores: Any  # a tensor [positions, ...], or [...] for the whole window; or the generated texts


@dataclass(frozen=True, slots=True)
class PromptedText:
    """A text to embed behind another prompt than the model's default one."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerContext:
    """Everything beside the scores that an answer depends on."""

    tokenizer: Tokenizer
    head: Head
    top_k: int  # candidates that are listed
    thresholds: Mapping[str, float] = field(default_factory=dict)  # tuned or set, by name
    min_confidence: float = 0.0  # least probability of a label that is given; below it the label is ""
    least_probability: float | None = None  # of the labels in a prediction set; None: answers have none
    windows: Sequence[Encoding] = ()  # all windows of the input, also those without scored tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHead:
    """Turns the scores of a head into answers to inputs of one form."""

    expects: str  # description of the form of its inputs
    tokenizer_inputs: Callable[[object], list[TokenizerInput] | None]  # None: the input has another form
    answer: Callable[[object, list[Window], AnswerContext], Answer]
    positions: Callable[[list[Encoding], Tokenizer], list[TokenPosition]] | None = (
        None  # the tokens to score; None: whole windows
    )
    long_inputs: Literal["stride", "truncate", "refuse"] = "stride"  # longer than the model reads
    windows: Callable[[list[Encoding], int | None], list[list[Encoding]]] | None = (
        None  # of tokenizer inputs that share a limit
    )
    generate: StartGeneration | None = None  # None: answers are made from scores
    summarize: Callable[[Tensor, AnswerContext], Sequence[object]] | None = (
        None  # shortens the scores of positions; None: they are kept
    )
    prediction: Callable[[Answer], Prediction]  # the typed form of an answer
    columns: Callable[
        [ModelBundle, GenerationConfig], dict[str, object]
    ]  # type of each field: str, [float], {"name": str}
    pairs: bool | None = None  # True: answers pairs of texts only; False: single texts only; None: either


def read_text(engine_input: object) -> list[TokenizerInput] | None:
    """Return one text as tokenizer input; None: the input has another form."""
    return [engine_input] if isinstance(engine_input, str) else None


def read_pair(engine_input: object) -> list[TokenizerInput] | None:
    """Return two texts, in a tuple or a list, as tokenizer input; None: the input has another form."""
    match engine_input:
        case (str() as first, str() as second):
            return [(first, second)]
    return None


def split_windows(item: TokenizerInput, encoded: Encoding, limit: int | None) -> list[Encoding]:
    """Split a long text into windows that overlap by half, and a pair as `pair_windows` does."""
    if limit is None or len(encoded) <= limit:
        return [encoded]
    if isinstance(item, tuple):
        return pair_windows(encoded, limit)
    return cut_windows(encoded, segment=0, max_length=limit)


def input_windows(
    answerer: AnswerHead, inputs: list[TokenizerInput], encodings: list[Encoding], limit: int | None
) -> list[list[Encoding]]:
    """Return the windows of each tokenizer input of one input.

    Raises:
        HeedfulError: If the input is longer than the limit and the answer needs all of it at once.
    """
    if answerer.long_inputs == "truncate":
        return [[encoding] for encoding in encodings]
    if answerer.long_inputs == "refuse" and limit is not None and max(map(len, encodings)) > limit:
        longest = max(map(len, encodings))
        raise HeedfulError(
            f"it has {longest} tokens, but this model reads {limit}, and its answer needs all of them at once: "
            f"shorten it by {longest - limit} tokens"
        )
    if answerer.windows is not None:
        return answerer.windows(encodings, limit)
    return [split_windows(item, encoding, limit) for item, encoding in zip(inputs, encodings, strict=True)]


def best_context_positions(windows: Sequence[Encoding], segment: int = 0) -> list[TokenPosition]:
    """Return, for each token of the windowed text in order, its position with the most context, beside each first text.

    Context is min(tokens on its left, tokens on its right) + 0.01 tokens of the window; the first
    window among equals (Devlin et al. 2019, the published code for SQuAD).
    """
    best: dict[tuple[int, int], tuple[float, TokenPosition]] = {}
    for number, window in enumerate(windows):
        positions = [position for position, of in enumerate(window.segments) if of == segment]
        for index, position in enumerate(positions):
            context = min(index, len(positions) - 1 - index) + 0.01 * len(positions)
            token = window.first_text_start, window.start + index
            if context > best.get(token, (-1.0,))[0]:
                best[token] = context, (number, position)
    return [position for _, position in best.values()]


def strip_span(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return a span without white space at its ends.

    >>> strip_span("a  b ", 1, 5)
    (3, 4)
    """
    part = text[start:stop]
    length = len(part.strip())
    start += len(part) - len(part.lstrip()) if length else 0
    return start, start + length


def dict_values(value: object, *keys: str) -> list[object] | None:
    """Return the values of a dict that has exactly these keys; None: it has others."""
    if not isinstance(value, dict) or set(value) != set(keys):
        return None
    return [value[key] for key in keys]


def group_by_window(positions: Iterable[TokenPosition], count: int) -> list[list[int]]:
    """Return the positions in each of `count` windows."""
    by_window: list[list[int]] = [[] for _ in range(count)]
    for number, position in positions:
        by_window[number].append(position)
    return by_window


def require_tokenizer(loaded: ModelBundle) -> Tokenizer:
    """Return the tokenizer; raise HeedfulError if the model has none."""
    if loaded.tokenizer is None:
        raise HeedfulError(
            f"{loaded.source} has no tokenizer: put its tokenizer.json, or vocab.txt, beside config.json"
        )
    return loaded.tokenizer
