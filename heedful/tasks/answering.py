"""The interface between tasks and the engine: how inputs become windows of tokens, and scores become answers.

Each task defines an `AnswerHead`. The engine encodes inputs with it, runs the model, and has it make the answers.
"""

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

AnswerInputs = Callable[[list[object]], list[Answer]]  # answers inputs, as an engine does
TokenPosition = tuple[int, int]  # (index of a window, position of a token in it)
StartGeneration = Callable[[ModelBundle, Tokenizer, Packed, "GenerationConfig"], Decoding]


class Window(NamedTuple):
    """A window of tokens with the head's outputs for it. A window is one sequence of a forward pass."""

    encoded: Encoding
    positions: Sequence[int]  # positions of the scored tokens; empty: one score for the whole window
    scores: Any  # scores [positions, ...], or [...] for the whole window, or the generated texts


@dataclass(frozen=True, slots=True)
class PromptedText:
    """A text to embed with a prompt in front of it, instead of the model's default prompt."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerContext:
    """Everything besides the scores that an answer depends on: tokenizer, head, and options of the user."""

    tokenizer: Tokenizer
    head: Head
    top_k: int  # number of candidates in an answer
    thresholds: Mapping[str, float] = field(default_factory=dict)  # thresholds of the model by name
    min_confidence: float = 0.0  # minimum probability of a predicted label; below it the label is ""
    least_probability: float | None = None  # minimum probability of labels in a prediction set; None: no set
    windows: Sequence[Encoding] = ()  # all windows of the input, including those without scored tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHead:
    """Converts inputs of one form to tokens, and the head's scores to answers."""

    expects: str  # description of the form of the inputs, with an example
    # returns the texts and pairs to encode; None if the input has a different form
    tokenizer_inputs: Callable[[object], list[TokenizerInput] | None]
    answer: Callable[[object, list[Window], AnswerContext], Answer]  # makes the answer to an input
    # returns the tokens to score; None: each window has one score
    positions: Callable[[list[Encoding], Tokenizer], list[TokenPosition]] | None = None
    long_inputs: Literal["stride", "truncate", "refuse"] = "stride"  # treatment of inputs longer than the model's limit
    # splits all tokenizer inputs of one input jointly, within a limit; None: each is split independently
    windows: Callable[[list[Encoding], int | None], list[list[Encoding]]] | None = None
    generate: StartGeneration | None = None  # starts text generation; None: answers come from scores
    # summarizes the scores of positions, to save memory; None: all scores are stored
    summarize: Callable[[Tensor, AnswerContext], Sequence[object]] | None = None
    prediction: Callable[[Answer], Prediction]  # converts an answer to its dataclass
    # returns the type of each field of an answer, such as str, [float] or {"name": str}
    columns: Callable[[ModelBundle, GenerationConfig], dict[str, object]]
    pairs: bool | None = None  # True: only pairs of texts; False: only single texts; None: both


def read_text(engine_input: object) -> list[TokenizerInput] | None:
    """Return a text as tokenizer input, or None if the input has a different form."""
    return [engine_input] if isinstance(engine_input, str) else None


def read_pair(engine_input: object) -> list[TokenizerInput] | None:
    """Return a tuple or list of two texts as tokenizer input, or None if the input has a different form."""
    match engine_input:
        case (str() as first, str() as second):
            return [(first, second)]
    return None


def split_windows(item: TokenizerInput, encoded: Encoding, limit: int | None) -> list[Encoding]:
    """Split a long text into windows of `limit` tokens that overlap by half, and a pair as `pair_windows` does."""
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
        HeedfulError: If the input is longer than the limit and cannot be split.
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
    """Return, for each token of a text, its position in the window where it has the most context.

    The context of a token is min(tokens on its left, tokens on its right) + 0.01 * tokens of the text in the window.
    Among windows with equal context the first one is chosen (Devlin et al. 2019, the published code for SQuAD).

    Args:
        windows: Windows of a text or of a pair of texts. If the first text of a pair is split too, each token of the
            second text has a position for every window of the first.
        segment: Index of the text in the pair, 0 or 1; 0 for a single text.
    """
    best: dict[tuple[int, int], tuple[float, TokenPosition]] = {}
    for window_index, window in enumerate(windows):
        positions = [position for position, its_segment in enumerate(window.segments) if its_segment == segment]
        for index, position in enumerate(positions):
            context = min(index, len(positions) - 1 - index) + 0.01 * len(positions)
            token = window.first_text_start, window.start + index  # identifies the token across windows
            if context > best.get(token, (-1.0,))[0]:
                best[token] = context, (window_index, position)
    return [position for _, position in best.values()]


def strip_span(text: str, start: int, stop: int) -> tuple[int, int]:
    """Return a span of characters without the white space at its ends.

    >>> strip_span("a  b ", 1, 5)
    (3, 4)
    """
    part = text[start:stop]
    length = len(part.strip())
    start += len(part) - len(part.lstrip()) if length else 0
    return start, start + length


def dict_values(value: object, *keys: str) -> list[object] | None:
    """Return the values of a dict that has exactly these keys, or None for any other value."""
    if not isinstance(value, dict) or set(value) != set(keys):
        return None
    return [value[key] for key in keys]


def group_by_window(positions: Iterable[TokenPosition], count: int) -> list[list[int]]:
    """Group token positions by window. Return one list of positions for each of the `count` windows."""
    by_window: list[list[int]] = [[] for _ in range(count)]
    for window_index, position in positions:
        by_window[window_index].append(position)
    return by_window


def require_tokenizer(loaded: ModelBundle) -> Tokenizer:
    """Return the model's tokenizer; raise HeedfulError if it has none."""
    if loaded.tokenizer is None:
        raise HeedfulError(
            f"{loaded.source} has no tokenizer: put its tokenizer.json, or vocab.txt, beside config.json"
        )
    return loaded.tokenizer
