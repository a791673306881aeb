"""Attention weights of a text as plain data."""

from __future__ import annotations

from typing import TypedDict

import torch

from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.scheduling.errors import TooLongError
from heedful.model.trace import Part, Trace, check_numbers
from heedful.packed import Packed
from heedful.tasks.generation import decoder_prompts
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput


class AttentionWeights(TypedDict):
    """The response of /attention."""

    tokens: list[dict[str, object]]
    layers: list[dict[str, object]]


def attention_response(
    engine: BundleEngine, item: TokenizerInput, layers: list[int] | None, heads: list[int] | None, most: int
) -> AttentionWeights:
    """Return tokens and weights of layers and heads, counted from 0 (None: all); at most `most` weights."""
    loaded = engine.loaded
    read = loaded.default_prompt + item + loaded.text_suffix if isinstance(item, str) else item
    (encoded,) = decoder_prompts(loaded, engine.tokenizer, [engine.tokenizer.encode(read)])
    if engine.limit is not None and len(encoded) > engine.limit:
        raise TooLongError(f"the text has {len(encoded)} tokens, and this model reads {engine.limit} at once")
    stacks = [stack for stack in (loaded.config.model.encoder, loaded.config.model.decoder) if stack is not None]
    if not stacks:
        raise HeedfulError("this model has no layers of self-attention to look into")
    parts: list[Part] = ["encoder"] if loaded.needs_target else ["encoder", "decoder", "cross"]
    for what, asked, count in (
        ("layers", layers, max(stack.layers for stack in stacks)),
        ("heads", heads, min(stack.heads for stack in stacks)),
    ):
        check_numbers(what, asked, count)
    asked_layers = sum(len(set(layers)) if layers is not None else stack.layers for stack in stacks)
    asked_heads = len(heads) if heads is not None else max(stack.heads for stack in stacks)
    count = asked_layers * asked_heads * len(encoded) ** 2
    if count > most:
        raise TooLongError(
            f"these are {count} weights, and an answer has at most {most}: ask for some layers and heads"
        )
    batch = Packed.of([encoded.ids], [encoded.types])
    trace = Trace(layers=layers, heads=heads, parts=parts)
    with torch.inference_mode():
        loaded.hidden_states(batch, Packed.of([[0]]) if loaded.needs_target else None, trace=trace)
    attention: list[dict[str, object]] = []
    for (part, layer, _), attended in sorted(trace.attention.items()):
        assert attended.weights is not None
        names = list(range(attended.weights.shape[0])) if heads is None else heads
        weights = attended.weights.to("cpu", torch.float64).round(decimals=6)
        attention.append({"part": part, "layer": layer, "heads": names, "weights": weights.tolist()})
    return {"tokens": token_infos(encoded, engine.tokenizer), "layers": attention}


def token_infos(encoded: Encoding, tokenizer: Tokenizer, *, special: bool = True) -> list[dict[str, object]]:
    """Return the id and name of each token, and the characters of the text that it covers."""
    return [
        {"id": id, "text": tokenizer.name(id), "special": alone, "start": start, "stop": stop}
        for id, alone, (start, stop) in zip(encoded.ids, encoded.special, encoded.offsets, strict=True)
        if special or not alone
    ]
