"""Inside: one text in one model, with everything between its words and its rows at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import Loaded
from heedful.errors import HeedfulError
from heedful.look import classic_attention
from heedful.model.classic import Classic
from heedful.model.trace import Attended, Part, Trace, What, within
from heedful.nn.layout import Call
from heedful.packed import Packed
from heedful.tasks.seq2seq import GenerationConfig, decoder_prompts, sequence_ends, start_generation
from heedful.tokenizer import Encoded, Tokenizer

LONGEST = 4096  # tokens, where the model itself has no limit
NAME = 200  # characters of a token that are kept: a page shows fewer
WRITES = 64  # tokens of a target that the model writes itself

Side = Literal["source", "target", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A part of a model in which rows look at keys: so many layers of so many heads."""

    part: str  # "encoder", "decoder", "cross", or of a classic model "over" or "reader"
    layers: int
    heads: int
    rows: Side
    keys: Side
    names: tuple[str, ...] = ()  # of the heads, where they have any


@dataclass(kw_only=True, eq=False)
class ProjectionTrace(Trace):
    """A trace that keeps q, k and v of all layers, so that any head's scores can be computed afterwards."""

    calls: dict[tuple[str, int], tuple[Tensor, Tensor, Tensor, Call]] = field(default_factory=dict, init=False)

    def take(self, part: Part, layer: int, count: int, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        """Keep them; nothing is computed."""
        self.calls[part, layer] = q, k, v, call


class Inspection:
    """A model and a text, or a pair; weights, scores and states of any layer and head are computed when asked for."""

    def __init__(
        self,
        loaded: Loaded,
        item: str | tuple[str, str],
        *,
        target: str | None = None,
        name: str = "",
        choices: Sequence[str] = (),
    ) -> None:
        """`target` is what the decoder beside an encoder reads; None: what the model writes, or the text itself.

        `choices` are all candidates of a prompt, of which the item's second text is one.
        """
        self.encoded, why = encode_item(loaded, item)
        if why:
            raise HeedfulError(why)
        assert loaded.tokenizer is not None
        self.loaded, self.item, self.tokenizer = loaded, item, loaded.tokenizer
        self.name, self.choices = name or loaded.source, tuple(choices)
        self.source = Packed.of([self.encoded.ids], [self.encoded.types])
        read, written = self._target(target)
        self.target = read
        self.target_is_generated = written
        wanted: tuple[What, ...] = ("states", "weights")
        self.trace = ProjectionTrace(what=[each for each in wanted if each in loaded.model.gives])
        training = loaded.training
        loaded.eval()
        try:
            with torch.no_grad():
                self.last_hidden_state: Tensor = loaded.rows(self.source, self.target, trace=self.trace)
        finally:
            loaded.train(training)
        self.block_record: tuple[tuple[str, int], dict[str, tuple[Tensor, Tensor]]] | None = None  # see block_steps.py
        self.views = tuple(self._views())
        self.sides: dict[str, list[dict[str, Any]]] = {"source": text_token_records(self.encoded, self.tokenizer)}
        read_too = self.target if self.target is not None else self._shifted()
        if read_too is not None:
            self.sides["target"] = token_records(read_too.tokens.tolist(), self.tokenizer)
        if self.target is not None and loaded.config.head is not None and loaded.config.head.kind == "language_model":
            self.sides["said"] = self._said(self.target)
        if any(view.rows == "text" for view in self.views):
            self.sides["text"] = [_token("the text", None)]

    def _target(self, given: str | None) -> tuple[Packed | None, bool]:
        """What the decoder reads, and whether the model wrote it."""
        loaded = self.loaded
        if not loaded.needs_target:
            if given is not None:
                raise HeedfulError("a target was given, but this model has no decoder that reads one: leave it out")
            return None, False
        if given is None and loaded.head is None:
            return self.source.shifted(loaded.config.model.start or 0), False
        mark = sequence_ends(loaded.config.model, self.tokenizer)
        start = 0 if mark.start is None else mark.start
        if given is not None:
            encoded = self.tokenizer.encode(given)
            inner = [i for i, segment in zip(encoded.ids, encoded.segments, strict=True) if segment is not None]
            return Packed.of([[start, *inner]]), False
        training = loaded.training
        loaded.eval()
        try:
            ((best, *_),) = start_generation(
                loaded, self.tokenizer, self.source, GenerationConfig(max_new_tokens=WRITES)
            ).run()
        finally:
            loaded.train(training)
        return Packed.of([[start, *best.tokens]]), True

    def _said(self, target: Packed) -> list[dict[str, Any]]:
        """What stands after each token that the decoder reads; after the last one, what the model would write."""
        assert self.loaded.head is not None
        with torch.no_grad():
            last = self.loaded.head(self.last_hidden_state[-1:], Packed.of([[0]]))
        return token_records([*target.tokens.tolist()[1:], int(last[0].argmax())], self.tokenizer)

    def _shifted(self) -> Packed | None:
        """What a decoder reads whose head reads no other text than the encoder's."""
        start = self.loaded.config.model.start
        model = self.loaded.config.model
        both = model.encoder is not None and model.decoder is not None
        return self.source.shifted(start) if both and start is not None else None

    def _views(self) -> list[View]:
        model = self.loaded.config.model
        views = []
        if (stack := model.encoder) is not None:
            views.append(View(part="encoder", layers=stack.layers, heads=stack.heads, rows="source", keys="source"))
        if (stack := model.decoder) is not None:
            own: Side = "source" if model.encoder is None else "target"
            views.append(View(part="decoder", layers=stack.layers, heads=stack.heads, rows=own, keys=own))
            if stack.cross:
                views.append(View(part="cross", layers=stack.layers, heads=stack.heads, rows=own, keys="source"))
        if ("cross", 0, 0) in self.trace.attention:  # recurrent nets that look without queries and keys
            views.append(View(part="cross", layers=1, heads=1, rows="target", keys="source"))
        if isinstance(self.loaded.model, Classic):
            for part, names, rows in classic_attention.attention_parts(self.loaded):
                side: Side = "text" if rows == "text" else "source"
                views.append(View(part=part, layers=1, heads=len(names), rows=side, keys="source", names=names))
        if not views:
            raise HeedfulError(f"{self.loaded.source} has no attention: nothing in it looks at anything")
        return views

    def view(self, part: str) -> View:
        """The part of that name."""
        for view in self.views:
            if view.part == part:
                return view
        raise HeedfulError(f'there is no part "{part}", but {", ".join(view.part for view in self.views)}')

    def attention(
        self,
        part: str,
        layer: int,
        what: Sequence[What] = ("weights",),
        *,
        heads: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Attended:
        """One layer's attention, of the chosen heads and rows."""
        view = self.view(part)
        within("layers", [layer], view.layers)
        with torch.no_grad():
            if (part, layer) not in self.trace.calls:
                found = self._without_scores(part, layer)
                chosen = list(within("heads", heads, len(found)))
                return Attended(scale=1.0, weights=found[chosen] if rows is None else found[chosen][:, list(rows)])
            q, k, v, call = self.trace.calls[part, layer]
            kind: Any = part
            trace = Trace(what=what, heads=heads, rows=rows)
            trace.take(kind, layer, 1, q, k, v, call)
            return trace.attention[kind, layer, 0]

    def _without_scores(self, part: str, layer: int) -> Float[Tensor, "heads rows keys"]:
        """Weights of what looks without queries and keys that were kept."""
        kind: Any = part
        kept = self.trace.attention.get((kind, layer, 0))
        if kept is None:
            return classic_attention.attention_weights(self.loaded, self.source, part)
        assert kept.weights is not None
        return kept.weights

    def weights(self, part: str, layer: int, heads: Sequence[int] | None = None) -> Float[Tensor, "heads rows keys"]:
        """How much each row takes of each key."""
        found = self.attention(part, layer, heads=heads).weights
        assert found is not None
        return found

    def thumbnails(self, part: str, layer: int, max_size: int = 48) -> Float[Tensor, "heads rows keys"]:
        """The same made small: the largest weight of each tile, so that a thin line stays one."""
        found = self.weights(part, layer)[None]
        size = tuple(min(max_size, length) for length in found.shape[2:])
        if size == tuple(found.shape[2:]):
            return found[0]
        small: Tensor = F.adaptive_max_pool2d(found, size)[0]
        return small

    def rollout(self, part: str) -> Float[Tensor, "rows keys"]:
        """What each row takes of each word through all layers: the product of (A + 1) / 2, A the mean over heads.

        Abnar and Zuidema 2020, section 3. Half of what goes on is taken to be the residual.
        """
        view = self.view(part)
        if view.rows != view.keys or (part, 0) not in self.trace.calls:
            raise HeedfulError(f"the {part} does not look at its own rows, so its layers cannot be multiplied")
        with torch.no_grad():
            mixed = torch.eye(len(self.sides[view.rows]))
            for layer in range(view.layers):
                mean = self.weights(part, layer).mean(0)
                mixed = (0.5 * mean + 0.5 * torch.eye(len(mean))) @ mixed
            return mixed

    def hidden_states(self, part: str) -> list[Float[Tensor, "rows width"]]:
        """The rows before each block, and those that come out of the last one."""
        kind: Any = part
        count = self.view(part).layers
        return [self.trace.states[kind, layer, 0] for layer in range(count + 1)]


def encode_item(loaded: Loaded, item: str | tuple[str, str]) -> tuple[Encoded, str]:
    """A text's tokens, and why the model does not read them at once; nothing, where it does."""
    if loaded.tokenizer is None:
        raise HeedfulError(f"{loaded.source} has no tokenizer: put its tokenizer.json beside config.json")
    read = item + loaded.text_suffix if isinstance(item, str) else item
    (found,) = decoder_prompts(loaded, loaded.tokenizer, [loaded.tokenizer.encode(read)])
    most = LONGEST if loaded.limit is None else loaded.limit
    wanted = "a shorter one" if found.ids else "one with words"
    why = f"the text has {len(found)} tokens, and this model reads 1 to {most} at once: give {wanted}"
    return found, "" if 1 <= len(found) <= most else why


def inspect_choices(
    loaded: Loaded, prompt: str, choices: Sequence[str], *, target: str | None = None, name: str = ""
) -> list[Inspection]:
    """A prompt beside each of its candidates."""
    head = loaded.config.head
    if head is None or head.kind != "multiple_choice":
        kind = "no head" if head is None else f"a {head.kind} head"
        raise HeedfulError(
            f"candidates were given, but this model has {kind}: give a run of heedful finetune multiple-choice"
        )
    if len(choices) < 2:
        raise HeedfulError(f"{len(choices)} candidate was given: give two or more, of which one is chosen")
    return [Inspection(loaded, (prompt, each), target=target, name=name, choices=choices) for each in choices]


def text_token_records(encoded: Encoded, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Each token as plain data: its name, segment and word, and which characters of its text it stands for."""
    columns = zip(encoded.ids, encoded.segments, encoded.words, encoded.offsets, strict=True)
    found: list[dict[str, Any]] = []
    last: tuple[int | None, int | None] = (None, None)
    for id, segment, word, (start, stop) in columns:
        goes_on = word is not None and (segment, word) == last
        more = {"start": start, "stop": stop, "segment": segment, "special": segment is None, "continues": goes_on}
        found.append(_token(readable_token(id, tokenizer), id) | more)
        last = segment, word
    return found


def token_records(ids: Sequence[int], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Tokens that belong to no text, as what a decoder reads; the embedding may have more rows than there are names."""
    special = tokenizer.special
    around = {special.first, special.separator, special.pad, special.mask}
    try:
        continues = tokenizer.continues
    except HeedfulError:  # each token is a word
        continues = np.zeros(tokenizer.size, np.bool_)
    found = []
    for place, id in enumerate(ids):
        try:
            name = readable_token(id, tokenizer)
        except HeedfulError:
            name = f"token {id}"
        goes_on = place > 0 and id < len(continues) and bool(continues[id]) and id not in around
        found.append(_token(name, id) | {"special": id in around, "continues": goes_on})
    return found


def readable_token(id: int, tokenizer: Tokenizer) -> str:
    """A token's name to read: bytes become their characters where they are whole ones, and "\u2581" stands for a space.

    A byte-level vocabulary spells "\u0120caf\u00c3\u00a9" what is read as "\u2581caf\u00e9".
    """
    name, space = tokenizer.name(id), tokenizer.id("\u0120")
    if space is None or tokenizer.decode([space], skip_special=False) != " ":
        return name
    text = tokenizer.decode([id], skip_special=False)
    return name if not text or "\ufffd" in text else text.replace(" ", "\u2581")


def _token(text: str, id: int | None) -> dict[str, Any]:
    name = text if len(text) <= NAME else f"{text[:NAME]}… ({len(text):,} characters)"
    return {"text": name, "id": id, "segment": 0, "special": False, "continues": False}
