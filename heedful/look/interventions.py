"""Predictions with attention heads switched off and tokens of the text replaced, for the page of `heedful look`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

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

    before: Answer | None  # answer of the engine; None if the task head gives no answer for one text (embeddings)
    after: Answer | None
    changed_item: str | tuple[str, str]  # the text or pair with its tokens replaced
    cosine: float | None  # cosine of the text's embeddings before and after; None if there is an answer instead


def intervene(
    inspections: Sequence[Inspection], index: int, masked_heads: Sequence[Head], replacements: Mapping[int, str]
) -> Intervention:
    """Predict without some heads, and with some tokens replaced.

    The output of a masked head is multiplied by 0 before the heads are joined (Michel et al. 2019, section 2.2). Hooks
    on the model do this, so that no other thread may use the model meanwhile: `local_server.py` holds a lock.

    Args:
        inspections: The texts that the page shows, one inspection each.
        index: Index of the inspection to change, from 0.
        masked_heads: Heads to mask.
        replacements: Mapping from the position of a token to the words in its place.

    Raises:
        RequestError: If the model has no such head, a token is special, or two tokens share characters.
        HeedfulError: If there is no such layer, head or token.
    """
    inspection = inspections[index]
    changed_item = replace_tokens(inspection, replacements)
    has_new_text = changed_item != inspection.item
    if has_new_text and inspection.choices:
        raise RequestError("tokens of one candidate cannot be replaced here: change the text in the field above")
    gates = masking_gates(inspection, masked_heads)
    changed = inspection
    if has_new_text:
        changed = Inspection(inspection.loaded, changed_item, name=inspection.name)
    pair = compared_texts(inspections, index)
    changed_inspections = [*inspections[:index], changed, *inspections[index + 1 :]]
    changed_pair = compared_texts(changed_inspections, index) if pair is not None else None
    task_head = inspection.loaded.config.head
    if task_head is not None and task_head.kind == "embedding" and pair is None:
        cosine = F.cosine_similarity(_embedding(inspection, None), _embedding(changed, gates), dim=0)
        return Intervention(before=None, after=None, changed_item=changed_item, cosine=float(cosine))
    return Intervention(
        before=engine_answer(inspection, pair),
        after=engine_answer(changed, changed_pair, gates=gates),
        changed_item=changed_item,
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
        if part not in gates:  # the name comes from a request, so only its beginning is quoted
            raise RequestError(f'part "{part[:40]}" has no heads to switch off: use one of {", ".join(gates)}')
        check_indices("layers", [layer], len(gates[part]))
        check_indices("heads", [head], gates[part].shape[1])
        gates[part][layer, head] = 0.0
    return gates


def replace_tokens(inspection: Inspection, replacements: Mapping[int, str]) -> str | tuple[str, str]:
    """Return the text or pair with words in place of tokens.

    Args:
        inspection: The model and the text.
        replacements: Mapping from the position of a token to the words in its place.

    Raises:
        RequestError: If a token is special, or if two of the tokens share characters, as tokens of single bytes do.
        HeedfulError: If there is no such token.
    """
    tokens = inspection.sides["source"]
    item = inspection.item
    texts = [item] if isinstance(item, str) else list(item)
    unchanged_stops = [len(text) for text in texts]  # for each text, the end of its part without replacements
    for position in sorted(replacements, reverse=True):  # from the end: offsets of tokens before it remain valid
        check_indices("tokens", [position], len(tokens))
        token = tokens[position]
        segment = token["segment"]
        if segment is None or "start" not in token:
            raise RequestError(f"{token['text']} is in no text: replace another token")
        if token["stop"] > unchanged_stops[segment]:
            raise RequestError(f"{token['text']} shares characters with another replaced token: replace one of them")
        unchanged_stops[segment] = token["start"]
        text = texts[segment]
        texts[segment] = text[: token["start"]] + replacements[position] + text[token["stop"] :]
    return texts[0] if isinstance(item, str) else (texts[0], texts[1])


def _embedding(inspection: Inspection, gates: Mapping[str, Tensor] | None) -> Tensor:
    """Return the embedding of the text, with head outputs scaled by `gates` if there are any."""
    engine = Engine(inspection.loaded)
    with nullcontext() if gates is None else gated_heads(inspection.loaded.model, gates):
        return torch.tensor(engine([inspection.item])[0]["vector"])
