"""The responses of /attention and /tokenize: the tokens of a text and their attention weights, as data for JSON."""

from __future__ import annotations

from typing import TypedDict

import torch

from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.scheduling.errors import TooLongError
from heedful.model.trace import Part, Trace, check_indices
from heedful.packed import Packed
from heedful.tasks.generation import decoder_prompts
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput


class AttentionWeights(TypedDict):
    """The response of /attention."""

    tokens: list[dict[str, object]]
    layers: list[dict[str, object]]


def attention_response(
    engine: BundleEngine,
    tokenizer_input: TokenizerInput,
    layers: list[int] | None,
    heads: list[int] | None,
    max_weights: int,
) -> AttentionWeights:
    """Return the tokens of a text and their attention weights.

    Args:
        engine: The engine.
        tokenizer_input: A text or a pair of texts.
        layers: Indices of layers, from 0. If None, all layers.
        heads: Indices of heads, from 0. If None, all heads.
        max_weights: Maximum number of attention weights.

    Raises:
        TooLongError: If the text is longer than the model's limit, or there are too many weights.
        HeedfulError: If the model has no self-attention, or a layer or head does not exist.
    """
    bundle = engine.loaded
    if isinstance(tokenizer_input, str):
        tokenizer_input = bundle.default_prompt + tokenizer_input + bundle.text_suffix
    (encoded,) = decoder_prompts(bundle, engine.tokenizer, [engine.tokenizer.encode(tokenizer_input)])
    if engine.limit is not None and len(encoded) > engine.limit:
        raise TooLongError(f"the text has {len(encoded)} tokens, and this model reads {engine.limit} at once")
    stacks = [stack for stack in (bundle.config.model.encoder, bundle.config.model.decoder) if stack is not None]
    if not stacks:
        raise HeedfulError("this model has no layers of self-attention to look into")
    parts: list[Part] = ["encoder"] if bundle.needs_target else ["encoder", "decoder", "cross"]
    check_indices("layers", layers, max(stack.layers for stack in stacks))
    check_indices("heads", heads, min(stack.heads for stack in stacks))
    layer_count = sum(len(set(layers)) if layers is not None else stack.layers for stack in stacks)
    head_count = len(heads) if heads is not None else max(stack.heads for stack in stacks)
    count = layer_count * head_count * len(encoded) ** 2
    if count > max_weights:
        raise TooLongError(
            f"the attention of this text has {count} weights, and a response has at most {max_weights}: choose fewer "
            "layers or heads"
        )
    device = next(bundle.parameters()).device
    batch = Packed.of([encoded.ids], [encoded.types]).to(device)
    target = Packed.of([[0]]).to(device) if bundle.needs_target else None
    trace = Trace(layers=layers, heads=heads, parts=parts)
    with torch.inference_mode():
        bundle.hidden_states(batch, target, trace=trace)
    attention: list[dict[str, object]] = []
    for (part, layer, _), layer_attention in sorted(trace.attention.items()):
        assert layer_attention.weights is not None
        head_indices = list(range(layer_attention.weights.shape[0])) if heads is None else heads
        weights = layer_attention.weights.to("cpu", torch.float64).round(decimals=6)
        attention.append({"part": part, "layer": layer, "heads": head_indices, "weights": weights.tolist()})
    return {"tokens": token_infos(encoded, engine.tokenizer), "layers": attention}


def token_infos(encoded: Encoding, tokenizer: Tokenizer, *, special: bool = True) -> list[dict[str, object]]:
    """Return the id and name of each token, and the characters of the text that it covers.

    Args:
        encoded: The tokens.
        tokenizer: The tokenizer of these tokens.
        special: Whether to include special tokens.
    """
    return [
        {"id": id, "text": tokenizer.name(id), "special": is_special, "start": start, "stop": stop}
        for id, is_special, (start, stop) in zip(encoded.ids, encoded.special, encoded.offsets, strict=True)
        if special or not is_special
    ]
