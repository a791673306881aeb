"""Texts and pairs of texts in the bodies of /predict."""

from __future__ import annotations

from typing import Any

from heedful.errors import HeedfulError
from heedful.serve.requests import TextPair

FORMS = (
    'write [["first", "second"]] or {"text": "first", "text_pair": "second"} for a pair, and [["one"], ["other"]] for '
    "two texts"
)


def parse_sequences(inputs: Any, learned: bool | None) -> tuple[list[Any], bool]:
    """Return texts, pairs as tuples, and whether the request is a single one instead of a list.

    Args:
        inputs: a text, an object, or a list of texts, of [text] and [text, second text], or of objects.
        learned: whether the model learned pairs; None: not known.

    A list is a batch. A list of two texts is a single pair for a model that learned pairs, as in Text Embeddings
    Inference; where it is not known what the model learned it is refused.
    """
    if not isinstance(inputs, list):
        return [_sequence(inputs, learned)], True
    if inputs and all(isinstance(input_value, str) for input_value in inputs) and learned is not False:
        if len(inputs) == 2 and learned:
            return [tuple(inputs)], True
        if len(inputs) == 2 or learned:
            what = "two texts or a pair" if len(inputs) == 2 else "texts, and this model learned pairs"
            raise HeedfulError(f"inputs is a list of {what}: {FORMS}")
    if any(isinstance(input_value, str) for input_value in inputs) and any(
        isinstance(input_value, list) for input_value in inputs
    ):
        raise HeedfulError("inputs is a list of texts and of lists: write each text as [text] in it")
    return [_sequence(input_value, learned) for input_value in inputs], False


def _sequence(given: Any, learned: bool | None) -> Any:
    match given:
        case str():
            return given
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
    raise AssertionError(given)
