"""`Inspection`: one text in one model, with its tokens, hidden states and attention. All of `look` is built on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, NotRequired, TypedDict, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError, ModelError, RequestError
from heedful.look import classic_attention
from heedful.model.classic import ClassicModel
from heedful.model.decode import Greedy
from heedful.model.trace import AttentionTrace, Part, Trace, TraceItem, check_indices
from heedful.nn.layout import AttentionArgs
from heedful.packed import Packed
from heedful.tasks.generation import (
    GenerationConfig,
    decoder_prompts,
    folder_generation,
    generation_inputs,
    sequence_ends,
    start_generation,
)
from heedful.tokenizer import Encoding, Tokenizer

MAX_TOKENS = 4096  # maximum tokens of a text, for models without a limit of their own
MAX_NAME_CHARS = 200  # characters after which the name of a token is cut
MAX_TARGET_TOKENS = 64  # maximum tokens of a target that the model generates

Side = Literal["source", "target", "text"]


class TokenRecord(TypedDict):
    """A token as plain data."""

    text: str
    id: int | None  # None for a row that represents a whole text
    segment: int | None  # which text of a pair, from 0; None for special tokens
    special: bool
    continues: bool  # whether the token continues the word of the token before
    start: NotRequired[int]  # offset of the first character in its text
    stop: NotRequired[int]  # offset after the last character


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A part of a model that has attention weights: how many layers and heads it has, and what rows and keys are."""

    part: str  # "encoder", "decoder", "cross"; "over" or "reader" of a classic model
    layers: int
    heads: int
    rows: Side  # tokens that attend
    keys: Side  # tokens that are attended to
    names: tuple[str, ...] = ()  # names of the heads, if they have any


@dataclass(kw_only=True, eq=False)
class ProjectionTrace(Trace):
    """A trace that stores q, k and v of all layers, so that any head's scores can be computed afterwards.

    `calls` has q, k, v and the other arguments of attention, by part and layer.
    """

    calls: dict[tuple[str, int], tuple[Tensor, Tensor, Tensor, AttentionArgs]] = field(default_factory=dict, init=False)

    def record_attention(
        self, part: Part, layer: int, sequences: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
    ) -> None:
        """Store the arguments of an attention call; compute nothing."""
        self.calls[part, layer] = q, k, v, call


class Inspection:
    """A text or pair in one model.

    The constructor runs the model once. Attention weights and scores of a layer are computed when a method needs them.

    Args:
        loaded: The model, with a tokenizer.
        item: A text, or a pair of texts.
        target: The decoder's input in a model with an encoder and a decoder. If None, the model generates it; a model
            without a language modelling head gets the source itself.
        name: Name to show (default: the model's source).
        choices: All candidates of a multiple-choice prompt; the second text of `item` is one of them.

    Raises:
        ModelError: If the model has no tokenizer or no attention.
        RequestError: If the text is empty or too long, or a target is given for a model that has none.
    """

    def __init__(
        self,
        loaded: ModelBundle,
        item: str | tuple[str, str],
        *,
        target: str | None = None,
        name: str = "",
        choices: Sequence[str] = (),
    ) -> None:
        self.encoded, reason = encode_item(loaded, item)
        if reason:
            raise RequestError(reason)
        assert loaded.tokenizer is not None
        self.loaded = loaded
        self.item = item
        self.tokenizer = loaded.tokenizer
        self.name = name or loaded.source
        self.choices = tuple(choices)
        self.source = Packed.of([self.encoded.ids], [self.encoded.types])
        self.target, self.target_is_generated = self._decoder_input(target)
        trace_items: tuple[TraceItem, ...] = ("states", "weights")
        self.trace = ProjectionTrace(what=[what for what in trace_items if what in loaded.model.traceable])
        with eval_mode(loaded):
            self.last_hidden_state: Tensor = loaded.hidden_states(self.source, self.target, trace=self.trace)
        # caches of block_steps.py: arguments of the blocks of each part; inputs and outputs of one block's modules
        self.block_inputs: dict[str, list[tuple[object, ...]]] = {}
        self.block_record: tuple[tuple[str, int], dict[str, tuple[Tensor, Tensor]]] | None = None
        self.views = tuple(self._views())
        self.sides: dict[str, list[TokenRecord]] = {
            "source": text_token_records(self.encoded, self.tokenizer, [item] if isinstance(item, str) else item)
        }
        decoder_input = self.target if self.target is not None else self._shifted_source()
        if decoder_input is not None:
            self.sides["target"] = token_records(decoder_input.tokens.tolist(), self.tokenizer)
        if self.target is not None and loaded.config.head is not None and loaded.config.head.kind == "language_model":
            self.sides["generated"] = self._generated_tokens(self.target)
        if any(view.rows == "text" for view in self.views):
            self.sides["text"] = [_record("the text", None)]

    def _decoder_input(self, target: str | None) -> tuple[Packed | None, bool]:
        """Return the decoder's input, or None if it needs no separate input, and whether the model generated it."""
        loaded = self.loaded
        if not loaded.needs_target:
            if target is not None:
                raise RequestError("a target was given, but this model has no decoder that reads one: leave it out")
            return None, False
        if target is None and loaded.head is None:
            return self.source.shift_right(loaded.config.model.start or 0), False
        if target is not None:
            start = sequence_ends(loaded.config.model, self.tokenizer).start or 0
            encoded = self.tokenizer.encode(target)
            ids = [id for id, segment in zip(encoded.ids, encoded.segments, strict=True) if segment is not None]
            return Packed.of([[start, *ids]]), False
        settings = greedy_settings(loaded, MAX_TARGET_TOKENS)
        prompt = generation_inputs(loaded, self.tokenizer, self.source, settings).prompts.tokens.tolist()
        with eval_mode(loaded):
            ((generated,),) = start_generation(loaded, self.tokenizer, self.source, settings).run()
        return Packed.of([[*prompt, *generated.tokens]]), True

    def _generated_tokens(self, target: Packed) -> list[TokenRecord]:
        """Return the token after each token of the target. After the last token, it is the one that is predicted."""
        assert self.loaded.head is not None
        with torch.no_grad():
            logits = self.loaded.head(self.last_hidden_state[-1:], Packed.of([[0]]))
        return token_records([*target.tokens.tolist()[1:], int(logits[0].argmax())], self.tokenizer)

    def _shifted_source(self) -> Packed | None:
        """Return the source shifted right if that is the decoder's input; else None."""
        model = self.loaded.config.model
        if model.encoder is None or model.decoder is None or not (model.starts_with_last or model.start is not None):
            return None
        return self.source.shift_right(None if model.starts_with_last else model.start)

    def _views(self) -> list[View]:
        """Return the parts of the model that have attention weights.

        Raises:
            ModelError: If no part has attention weights.
        """
        model = self.loaded.config.model
        views = []
        if (stack := model.encoder) is not None:
            views.append(View(part="encoder", layers=stack.layers, heads=stack.heads, rows="source", keys="source"))
        if (stack := model.decoder) is not None:
            rows: Side = "source" if model.encoder is None else "target"
            views.append(View(part="decoder", layers=stack.layers, heads=stack.heads, rows=rows, keys=rows))
            if stack.cross:
                views.append(View(part="cross", layers=stack.layers, heads=stack.heads, rows=rows, keys="source"))
        if ("cross", 0, 0) in self.trace.attention:  # recurrent models, which attend without queries and keys
            views.append(View(part="cross", layers=1, heads=1, rows="target", keys="source"))
        if isinstance(self.loaded.model, ClassicModel):
            for part, names, is_pooling in classic_attention.attention_parts(self.loaded):
                side: Side = "text" if is_pooling else "source"
                views.append(View(part=part, layers=1, heads=len(names), rows=side, keys="source", names=names))
        if not views:
            raise ModelError(f"{self.loaded.source} has no attention to show: give another model")
        return views

    def view(self, part: str) -> View:
        """Return the view of a part.

        Raises:
            RequestError: If the model has no such part.
        """
        for view in self.views:
            if view.part == part:
                return view
        raise RequestError(f'part "{part}" does not exist: use one of {", ".join(view.part for view in self.views)}')

    def attention(
        self,
        part: str,
        layer: int,
        what: Sequence[TraceItem] = ("weights",),
        *,
        heads: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> AttentionTrace:
        """Return one layer's attention.

        Args:
            part: A part of `views`.
            layer: Index of the layer, from 0.
            what: Fields of `AttentionTrace` to compute.
            heads: Indices of the heads, from 0. If None, all.
            rows: Positions of the tokens that attend, from 0. If None, all.

        Raises:
            RequestError: If there is no such part.
            HeedfulError: If there is no such layer or head.
        """
        view = self.view(part)
        check_indices("layers", [layer], view.layers)
        with torch.no_grad():
            if (part, layer) not in self.trace.calls:
                weights = self._traced_weights(part, layer)
                chosen = list(check_indices("heads", heads, len(weights)))
                return AttentionTrace(
                    scale=1.0, weights=weights[chosen] if rows is None else weights[chosen][:, list(rows)]
                )
            q, k, v, call = self.trace.calls[part, layer]
            stack_part = cast(Part, part)
            trace = Trace(what=what, heads=heads, rows=rows)
            trace.record_attention(stack_part, layer, 1, q, k, v, call)
            return trace.attention[stack_part, layer, 0]

    def _traced_weights(self, part: str, layer: int) -> Float[Tensor, "heads rows keys"]:
        """Return the attention weights of a recurrent or classic model, whose attention has no queries and keys."""
        traced = self.trace.attention.get((cast(Part, part), layer, 0))
        if traced is None:
            return classic_attention.classic_attention_weights(self.loaded, self.source, part)
        assert traced.weights is not None
        return traced.weights

    def weights(self, part: str, layer: int, heads: Sequence[int] | None = None) -> Float[Tensor, "heads rows keys"]:
        """Return the attention weights of one layer."""
        weights = self.attention(part, layer, heads=heads).weights
        assert weights is not None
        return weights

    def thumbnails(self, part: str, layer: int, max_size: int = 48) -> Float[Tensor, "heads rows keys"]:
        """Return the weights of one layer, reduced to at most `max_size` rows and keys by adaptive max pooling."""
        weights = self.weights(part, layer)[None]
        size = tuple(min(max_size, length) for length in weights.shape[2:])
        if size == tuple(weights.shape[2:]):
            return weights[0]
        pooled: Tensor = F.adaptive_max_pool2d(weights, size)[0]
        return pooled

    def rollout(self, part: str) -> Float[Tensor, "rows keys"]:
        """Return attention rollout: the product over layers of (A + I) / 2, where A is the mean of the heads' weights.

        The identity I represents the residual connection (Abnar and Zuidema 2020, section 3).

        Raises:
            RequestError: If the part has no self-attention with queries and keys.
        """
        view = self.view(part)
        if view.rows != view.keys or (part, 0) not in self.trace.calls:
            raise RequestError(f"rollout needs self-attention, which {part} is not: choose another part")
        with torch.no_grad():
            product = torch.eye(len(self.sides[view.rows]))
            for layer in range(view.layers):
                mean = self.weights(part, layer).mean(0)
                product = (0.5 * mean + 0.5 * torch.eye(len(mean))) @ product
            return product

    def hidden_states(self, part: str) -> list[Float[Tensor, "rows width"]]:
        """Return the hidden states before each block, and after the last one."""
        stack_part = cast(Part, part)
        layers = self.view(part).layers
        return [self.trace.states[stack_part, layer, 0] for layer in range(layers + 1)]


@contextmanager
def eval_mode(loaded: ModelBundle) -> Iterator[None]:
    """Context in which a model is in eval mode and no gradients are computed."""
    training = loaded.training
    loaded.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        loaded.train(training)


@contextmanager
def frozen_in_eval_mode(loaded: ModelBundle) -> Iterator[None]:
    """Context in which a model is in eval mode and its parameters require no gradients; inputs may require them."""
    training = loaded.training
    requires_grad = [parameter.requires_grad for parameter in loaded.parameters()]
    loaded.eval().requires_grad_(False)
    try:
        yield
    finally:
        loaded.train(training)
        for parameter, required in zip(loaded.parameters(), requires_grad, strict=True):
            parameter.requires_grad_(required)


def greedy_settings(loaded: ModelBundle, max_new_tokens: int) -> GenerationConfig:
    """Return the generation settings of the model folder, but greedy and with at most `max_new_tokens` new tokens."""
    settings = folder_generation(loaded).defaults
    return replace(settings, how=Greedy(), max_new_tokens=min(max_new_tokens, settings.max_new_tokens))


def encode_item(loaded: ModelBundle, item: str | tuple[str, str]) -> tuple[Encoding, str]:
    """Tokenize a text or pair.

    Returns:
        The tokens, and "" or an error message, if the text is empty or has more tokens than the model reads at once.
    """
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.source} has no tokenizer: put its tokenizer.json beside config.json")
    text = loaded.default_prompt + item + loaded.text_suffix if isinstance(item, str) else item
    (encoded,) = decoder_prompts(loaded, loaded.tokenizer, [loaded.tokenizer.encode(text)])
    limit = MAX_TOKENS if loaded.max_length is None else loaded.max_length
    if 1 <= len(encoded) <= limit:
        return encoded, ""
    advice = "a shorter one" if encoded.ids else "one with words"
    return encoded, f"the text has {len(encoded)} tokens, and this model reads 1 to {limit} at once: give {advice}"


def inspect_choices(
    loaded: ModelBundle, prompt: str, choices: Sequence[str], *, target: str | None = None, name: str = ""
) -> list[Inspection]:
    """Return an inspection of each candidate of a multiple-choice prompt."""
    head = loaded.config.head
    if head is None or head.kind != "multiple_choice":
        kind = "no head" if head is None else f"a {head.kind} head"
        raise RequestError(
            f"candidates were given, but this model has {kind}: give a run of heedful finetune multiple-choice"
        )
    if len(choices) < 2:
        raise RequestError(f"{len(choices)} candidate was given: give two or more")
    return [Inspection(loaded, (prompt, choice), target=target, name=name, choices=choices) for choice in choices]


def text_token_records(encoded: Encoding, tokenizer: Tokenizer, texts: Sequence[str]) -> list[TokenRecord]:
    """Return the tokens of a text or pair with their character offsets; the name of an unknown token shows its text.

    Args:
        texts: The one text, or both texts of the pair.
    """
    columns = zip(encoded.ids, encoded.segments, encoded.words, encoded.offsets, strict=True)
    records: list[TokenRecord] = []
    previous: tuple[int | None, int | None] = (None, None)
    for id, segment, word, (start, stop) in columns:
        name = readable_token(id, tokenizer)
        if id == tokenizer.special.unknown and segment is not None and stop > start:
            name = f"{name} {texts[segment][start:stop]}"
        record = _record(name, id)
        record["start"], record["stop"] = start, stop
        record["segment"], record["special"] = segment, segment is None
        record["continues"] = word is not None and (segment, word) == previous
        records.append(record)
        previous = segment, word
    return records


def token_records(ids: Sequence[int], tokenizer: Tokenizer) -> list[TokenRecord]:
    """Return tokens that belong to no text, such as a decoder's input. Ids beyond the vocabulary have no name."""
    special = tokenizer.special
    special_ids = {special.bos_or_cls, special.eos_or_sep, special.pad, special.mask}
    try:
        continues = tokenizer.continues
    except HeedfulError:  # the tokenizer does not mark the parts of words, so each token is treated as a word
        continues = np.zeros(tokenizer.size, np.bool_)
    records = []
    for position, id in enumerate(ids):
        try:
            name = readable_token(id, tokenizer)
        except HeedfulError:
            name = f"token {id}"
        record = _record(name, id)
        record["special"] = id in special_ids
        record["continues"] = position > 0 and id < len(continues) and bool(continues[id]) and id not in special_ids
        records.append(record)
    return records


def readable_token(id: int, tokenizer: Tokenizer) -> str:
    """Return a token's name; bytes of a byte-level vocabulary become characters, and a space becomes "\u2581".

    For example, "\u0120caf\u00c3\u00a9" is returned as "\u2581caf\u00e9". A token that ends within a character is
    returned as the vocabulary spells it.
    """
    name, space = tokenizer.name(id), tokenizer.id("\u0120")
    if space is None or tokenizer.decode([space], skip_special=False) != " ":
        return name
    text = tokenizer.decode([id], skip_special=False)
    return name if not text or "\ufffd" in text else text.replace(" ", "\u2581")


def _record(name: str, id: int | None) -> TokenRecord:
    if len(name) > MAX_NAME_CHARS:
        name = f"{name[:MAX_NAME_CHARS]}… ({len(name):,} characters)"
    return {"text": name, "id": id, "segment": 0, "special": False, "continues": False}
