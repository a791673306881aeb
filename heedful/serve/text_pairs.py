"""`parse_sequences`: the texts or pairs of texts in the body of a /predict request, which can have several forms."""

from __future__ import annotations

from heedful.errors import HeedfulError
from heedful.serve.requests import TextPair

FORMS = (
    'write [["first", "second"]] or {"text": "first", "text_pair": "second"} for a pair, and [["one"], ["other"]] for '
    "two texts"
)

Sequences = str | TextPair | list[str | list[str] | TextPair]


def parse_sequences(inputs: Sequences, learned_pairs: bool | None) -> tuple[list[str | tuple[str, ...]], bool]:
    """Return the texts or pairs in a request body, and whether the body has a single one and not a list.

    A list is a batch. As in Text Embeddings Inference, a list of two texts is a single pair for a model that was
    trained on pairs. Such a list is refused if it is unknown whether the model was trained on pairs.

    Args:
        inputs: A text, an object, or a list: of texts, of [text] and [text, second text], or of objects.
        learned_pairs: Whether the model was trained on pairs, or None if that is unknown.

    Raises:
        HeedfulError: If the form is ambiguous, or pairs are sent to a model that was not trained on pairs.
    """
    if not isinstance(inputs, list):
        return [_sequence(inputs, learned_pairs)], True
    texts = [text for text in inputs if isinstance(text, str)]
    if texts and len(texts) == len(inputs) and learned_pairs is not False:
        if len(inputs) == 2 and learned_pairs:
            return [tuple(texts)], True
        if len(inputs) == 2:
            raise HeedfulError(f"inputs is a list of two texts or a pair: {FORMS}")
        if learned_pairs:
            raise HeedfulError(f"inputs is a list of texts, and this model learned pairs: {FORMS}")
    if texts and any(isinstance(input_value, list) for input_value in inputs):
        raise HeedfulError("inputs is a list of texts and of lists: write each text as [text] in it")
    return [_sequence(input_value, learned_pairs) for input_value in inputs], False


def _sequence(value: str | list[str] | TextPair, learned_pairs: bool | None) -> str | tuple[str, ...]:
    """Return a text, or a pair as a tuple."""
    match value:
        case str():
            return value
        case [text]:
            return text
        case [text, pair]:
            if learned_pairs is False:
                raise HeedfulError(
                    'inputs has a pair, and this model learned single texts: write {"text": "...", "text_pair": "..."} '
                    "for a pair"
                )
            return text, pair
        case TextPair(text=text, text_pair=pair):
            return text if pair is None else (text, pair)
    raise AssertionError(value)
