"""Trace: what attention and blocks computed, for the layers, heads and rows that were asked for, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.nn.attend import attention_scores
from heedful.nn.layout import AttentionArgs

Part = Literal["encoder", "decoder", "cross"]  # self-attention of a stack, or the decoder's attention to the encoder
TraceItem = Literal["q", "k", "v", "scores", "weights", "states"]
ALL_ITEMS: tuple[TraceItem, ...] = get_args(TraceItem)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionTrace:
    """One layer's attention in one sequence, n rows to m keys; what was not asked for is None.

    q and k are as they are multiplied, with their places turned in: scores = scale q k + bias, with -inf where a row
    may not see a key, and weights = softmax(scores), before dropout.
    """

    scale: float
    q: Float[Tensor, "n heads width"] | None = None
    k: Float[Tensor, "m heads width"] | None = None
    v: Float[Tensor, "m heads value_width"] | None = None
    scores: Float[Tensor, "heads n m"] | None = None
    weights: Float[Tensor, "heads n m"] | None = None


@dataclass(kw_only=True, eq=False)
class Trace:
    """Asks for parts of a forward pass, and holds them after it: model(batch, trace=Trace(layers=[3])).

    None stands for all: layers from 0 in each stack, heads, sequences of the batch, rows (of q, scores and weights, by
    their place among the rows that were given of a sequence). States are a stack's rows before each block, and at the
    number of layers what comes out of it. Everything is computed anew from the fast path's own q and k, so that taking
    it changes no output.
    """

    what: Sequence[TraceItem] = ("weights",)
    parts: Sequence[Part] = ("encoder", "decoder", "cross")
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    sequences: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    attention: dict[tuple[Part, int, int], AttentionTrace] = field(
        default_factory=dict, init=False
    )  # part, layer, sequence
    states: dict[tuple[Part, int, int], Float[Tensor, "n width"]] = field(default_factory=dict, init=False)

    def check(self, layers: int, gives: Sequence[TraceItem]) -> None:
        """A HeedfulError where a layer was asked for that a model of so many does not have, or what it cannot give."""
        if wrong := [each for each in self.what if each not in gives]:
            has = f"{', '.join(gives)} alone" if gives else "none of these"
            raise HeedfulError(f"trace: {', '.join(wrong)} were asked for, but this model has {has}")
        last = layers if "states" in self.what else None  # what comes out of the last one
        check_numbers("trace: layers", [each for each in self.layers or () if each != last], layers)

    def records(self, part: Part, layer: int, what: Sequence[TraceItem]) -> bool:
        """Whether any of that was asked for."""
        asked = any(each in self.what for each in what)
        return asked and part in self.parts and (self.layers is None or layer in self.layers)

    @torch.no_grad()
    def record_attention(
        self, part: Part, layer: int, count: int, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
    ) -> None:
        """Keep what was asked for of one call of attention, of the first `count` sequences."""
        if not self.records(part, layer, ("q", "k", "v", "scores", "weights")):
            return
        heads = self._heads(q.shape[1])
        for number in self._numbers(min(count, len(call.layout.queries))):  # beams of one source are one there
            (start, stop), (first, last) = call.layout.queries[number], call.layout.keys[number]
            rows = self._rows(stop - start)
            scores = weights = None
            if "scores" in self.what or "weights" in self.what:
                found, sees = attention_scores(q, k, call, number, rows=rows, heads=heads)
                scores = found.masked_fill(~sees, -torch.inf) if "scores" in self.what else None
                if "weights" in self.what:
                    weights = found.softmax(-1).where(sees.any(-1, keepdim=True), 0.0)
            self.attention[part, layer, number] = AttentionTrace(
                scale=call.scale,
                q=q[start:stop][rows][:, heads] if "q" in self.what else None,
                k=k[first:last][:, heads] if "k" in self.what else None,
                v=v[first:last][:, heads] if "v" in self.what else None,
                scores=scores,
                weights=weights,
            )

    def record_states(self, part: Part, layer: int, count: int, x: Tensor, spans: Sequence[tuple[int, int]]) -> None:
        """Keep the rows that stand before a block."""
        if self.records(part, layer, ("states",)):
            for number in self._numbers(count):
                start, stop = spans[number]
                self.states[part, layer, number] = x[start:stop].detach()[self._rows(stop - start)].clone()

    def record_weights(self, part: Part, layer: int, weights: Sequence[Float[Tensor, "heads _n _m"]]) -> None:
        """Keep what was asked for of each sequence's weights, which were made in another way."""
        for number in self._numbers(len(weights)):
            each = weights[number].detach()
            chosen = each[self._heads(len(each))][:, self._rows(each.shape[1])]
            self.attention[part, layer, number] = AttentionTrace(scale=1.0, weights=chosen)

    def _numbers(self, count: int) -> Sequence[int]:
        return check_numbers("trace: sequences", self.sequences, count)

    def _heads(self, count: int) -> Tensor:
        return torch.tensor(check_numbers("trace: heads", self.heads, count))

    def _rows(self, count: int) -> Tensor:
        """Rows that a shorter sequence does not have are left out."""
        return torch.tensor([row for row in (range(count) if self.rows is None else self.rows) if row < count]).long()


def check_numbers(what: str, asked: Sequence[int] | None, count: int) -> Sequence[int]:
    """The numbers that were asked for, None for all of so many; a HeedfulError where there is none of that number."""
    if asked is None:
        return range(count)
    if wrong := [number for number in asked if not 0 <= number < count]:
        raise HeedfulError(f"{what} {wrong[:5]} were asked for, but there are {count}, from 0")
    return asked
