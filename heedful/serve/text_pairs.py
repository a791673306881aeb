"""Texts and pairs of texts in the bodies of /predict."""

from __future__ import annotations

from heedful.errors import HeedfulError
from heedful.serve.requests import TextPair

FORMS = (
    'write [["first", "second"]] or {"text": "first", "text_pair": "second"} for a pair, and [["one"], ["other"]] for '
    "two texts"
)

Sequences = str | TextPair | list[str | list[str] | TextPair]


def parse_sequences(inputs: Sequences, learned: bool | None) -> tuple[list[str | tuple[str, ...]], bool]:
    """Return texts, pairs as tuples, and whether the request is a single one instead of a list.

    Args:
        inputs: a text, an object, or a list of texts, of [text] and [text, second text], or of objects.
        learned: whether the model learned pairs; None: not known.

    A list is a batch. A list of two texts is a single pair for a model that learned pairs, as in Text Embeddings
    Inference; where it is not known what the model learned it is refused.
    """
    if not isinstance(inputs, list):
        return [_sequence(inputs, learned)], True
    texts = [text for text in inputs if isinstance(text, str)]
    if texts and len(texts) == len(inputs) and learned is not False:
        if len(inputs) == 2 and learned:
            return [tuple(texts)], True
        if len(inputs) == 2 or learned:
            what = "two texts or a pair" if len(inputs) == 2 else "texts, and this model learned pairs"
            raise HeedfulError(f"inputs is a list of {what}: {FORMS}")
    if texts and any(isinstance(input_value, list) for input_value in inputs):
        raise HeedfulError("inputs is a list of texts and of lists: write each text as [text] in it")
    return [_sequence(input_value, learned) for input_value in inputs], False


def _sequence(value: str | list[str] | TextPair, learned: bool | None) -> str | tuple[str, ...]:
    match value:
        case str():
            return value
        case [text]:
            return text
        case [text, pair]:
            if learned is False:
                raise HeedfulError(
                    'inputs has a pair, and this model learned single texts: write {"text": "...", "text_pair": "..."} '
                    "for a pair"
                )
            return text, pair
        case TextPair(text=text, text_pair=pair):
            return text if pair is None else (text, pair)
    raise AssertionError(value)
