"""Predictions with attention heads switched off and tokens of the text replaced, as the page asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from heedful.errors import RequestError
from heedful.infer.engine import Engine
from heedful.look.head_masking import gated_heads, open_gates
from heedful.look.inspection import Inspection
from heedful.look.prediction import compared_texts, engine_answer
from heedful.model.trace import check_indices
from heedful.tasks.answering import Answer

Head = tuple[str, int, int]  # part, layer, head


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Intervention:
    """A prediction before and after a change of heads or tokens."""

    before: Answer | None  # answer of the engine, or None if the head answers no single text
    after: Answer | None
    item: str | tuple[str, str]  # the text or pair with its tokens replaced
    cosine: float | None  # cosine of the text's embeddings before and after, if the model has a sentence embedding


def intervene(
    inspections: Sequence[Inspection], side: int, masked_heads: Sequence[Head], replacements: Mapping[int, str]
) -> Intervention:
    """Predict without some heads, and with some tokens replaced.

    The output of a masked head is multiplied by 0 before the heads are joined (Michel et al. 2019, section 2.2).

    Args:
        inspections: All inspections.
        side: Index of the inspection to change, from 0.
        masked_heads: Heads to mask.
        replacements: Words by the position of the token that they replace.

    Raises:
        RequestError: If the model has no such head, or a token is special.
        HeedfulError: If there is no such layer, head or token.
    """
    inspection = inspections[side]
    item = replace_tokens(inspection, replacements)
    gates = masking_gates(inspection, masked_heads)
    changed = inspection if item == inspection.item else Inspection(inspection.loaded, item, name=inspection.name)
    if changed is not inspection and inspection.choices:
        raise RequestError("tokens of one candidate cannot be replaced here: change the text in the field above")
    pair = compared_texts(inspections, side)
    changed_inspections = [changed if index == side else unchanged for index, unchanged in enumerate(inspections)]
    changed_pair = compared_texts(changed_inspections, side) if pair is not None else None
    head = inspection.loaded.config.head
    if head is not None and head.kind == "embedding" and pair is None:
        vectors = torch.stack([_vector(inspection, None), _vector(changed, gates)])
        cosine = float(torch.nn.functional.normalize(vectors, dim=1).prod(0).sum())
        return Intervention(before=None, after=None, item=item, cosine=cosine)
    return Intervention(
        before=engine_answer(inspection, pair),
        after=engine_answer(changed, changed_pair, gates=gates),
        item=item,
        cosine=None,
    )


def masking_gates(inspection: Inspection, masked_heads: Sequence[Head]) -> dict[str, Tensor] | None:
    """Return gates that are 0 for the masked heads and 1 for the others, or None if no head is masked.

    Raises:
        RequestError: If the model or the part has no heads that can be masked.
        HeedfulError: If there is no such layer or head.
    """
    if not masked_heads:
        return None
    gates = open_gates(inspection.loaded.model)
    if not gates:
        raise RequestError("this model has no heads that can be switched off: replace tokens instead")
    for part, layer, head in masked_heads:
        if part not in gates:
            raise RequestError(f'part "{part[:40]}" has no heads to switch off: use one of {", ".join(gates)}')
        check_indices("layers", [layer], len(gates[part]))
        check_indices("heads", [head], gates[part].shape[1])
        gates[part][layer, head] = 0.0
    return gates


def replace_tokens(inspection: Inspection, replacements: Mapping[int, str]) -> str | tuple[str, str]:
    """Return the text or pair with words in place of tokens.

    Args:
        inspection: The model and the text.
        replacements: Words by the position of the token that they replace.

    Raises:
        RequestError: If a token is special.
        HeedfulError: If there is no such token.
    """
    tokens = inspection.sides["source"]
    item = inspection.item
    texts = [item] if isinstance(item, str) else [*item]
    for row in sorted(replacements, reverse=True):  # from the end: offsets of tokens before it remain valid
        check_indices("tokens", [row], len(tokens))
        token = tokens[row]
        if token["segment"] is None or "start" not in token:
            raise RequestError(f"{token['text']} is in no text: replace another token")
        text = texts[token["segment"]]
        texts[token["segment"]] = text[: token["start"]] + replacements[row] + text[token["stop"] :]
    return texts[0] if isinstance(item, str) else (texts[0], texts[1])


def _vector(inspection: Inspection, gates: Mapping[str, Tensor] | None) -> Tensor:
    """Return the embedding of the text, with the outputs of heads multiplied by gates, if there are any."""
    engine = Engine(inspection.loaded)
    with nullcontext() if gates is None else gated_heads(inspection.loaded.model, gates):
        return torch.tensor(engine([inspection.item])[0]["vector"])
