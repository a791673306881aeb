"""Trace: records values of attention and blocks in a forward pass, for chosen layers, heads and rows.

`Transformer.forward(..., trace=Trace(...))` fills one; `look`, the server and distillation read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.errors import HeedfulError
from heedful.nn.attend import attention_logits
from heedful.nn.layout import AttentionArgs, with_dense_bias

Part = Literal["encoder", "decoder", "cross"]  # self-attention of a stack, or the decoder's attention to the encoder
TraceItem = Literal["q", "k", "v", "scores", "weights", "states"]
ALL_ITEMS: tuple[TraceItem, ...] = get_args(TraceItem)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionTrace:
    """One layer's attention in one sequence, from n queries to m keys; an item that was not selected is None.

    q, k and v have the same heads: shared heads of keys and values are repeated. q and k are those after rotation.
    """

    scale: float
    q: Float[Tensor, "n heads width"] | None = None
    k: Float[Tensor, "m heads width"] | None = None
    v: Float[Tensor, "m heads value_width"] | None = None
    scores: Float[Tensor, "heads n m"] | None = None  # scale q k + bias; -inf for masked pairs
    weights: Float[Tensor, "heads n m"] | None = None  # softmax(scores), before dropout


@dataclass(kw_only=True, eq=False)
class Trace:
    """A selection of values of a forward pass, and the recorded values: model(batch, trace=Trace(layers=[3])).

    "states" are the hidden states before each block of a stack; the output of a stack of n layers is at index n. Scores
    and weights are computed again from the q and k of the forward pass, so that a trace changes no output.

    Args:
        what: Items to record.
        parts: Parts of the model to record.
        layers: Layers to record, from 0 in each stack. If None, all.
        heads: Heads to record. If None, all.
        sequences: Sequences of the batch to record. If None, all.
        rows: Positions in the sequence at which to record q, scores, weights and states. If None, all.
    """

    what: Sequence[TraceItem] = ("weights",)
    parts: Sequence[Part] = ("encoder", "decoder", "cross")
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    sequences: Sequence[int] | None = None
    rows: Sequence[int] | None = None
    # recorded values by (part, layer, sequence)
    attention: dict[tuple[Part, int, int], AttentionTrace] = field(default_factory=dict, init=False)
    states: dict[tuple[Part, int, int], Float[Tensor, "n width"]] = field(default_factory=dict, init=False)

    def check(self, layers: int, traceable: Sequence[TraceItem]) -> None:
        """Raise HeedfulError unless a model with that many layers can record the chosen items and layers."""
        if unknown := [item for item in self.what if item not in traceable]:
            has = f"{', '.join(traceable)} alone" if traceable else "none of these"
            raise HeedfulError(f"trace: this model has no {', '.join(unknown)}; it has {has}")
        output = layers if "states" in self.what else None  # index of the stack's output among the states
        check_indices("trace: layers", [layer for layer in self.layers or () if layer != output], layers)

    def records(self, part: Part, layer: int, items: Sequence[TraceItem]) -> bool:
        """Return whether any of these items is recorded for a layer."""
        chosen = any(item in self.what for item in items)
        return chosen and part in self.parts and (self.layers is None or layer in self.layers)

    @torch.no_grad()
    def record_attention(
        self, part: Part, layer: int, sequences: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs
    ) -> None:
        """Record the selected items of one call of attention, for the first `sequences` sequences of the layout."""
        if not self.records(part, layer, ("q", "k", "v", "scores", "weights")):
            return
        heads = self._heads(q.shape[1])
        args = with_dense_bias(q, k, args)
        # the layout may have fewer sequences: in cross-attention, all beams of a source are one sequence
        for sequence in self._sequences(min(sequences, len(args.layout.queries))):
            query_rows, key_rows = (slice(*spans[sequence]) for spans in (args.layout.queries, args.layout.keys))
            rows = self._rows(query_rows.stop - query_rows.start)
            scores = weights = None
            if "scores" in self.what or "weights" in self.what:
                computed, visible = attention_logits(q, k, args, sequence, rows=rows, heads=heads)
                scores = computed.masked_fill(~visible, -torch.inf) if "scores" in self.what else None
                if "weights" in self.what:
                    weights = computed.softmax(-1).where(visible.any(-1, keepdim=True), 0.0)
            self.attention[part, layer, sequence] = AttentionTrace(
                scale=args.scale,
                q=q[query_rows][rows][:, heads] if "q" in self.what else None,
                k=k[key_rows][:, heads] if "k" in self.what else None,
                v=v[key_rows][:, heads] if "v" in self.what else None,
                scores=scores,
                weights=weights,
            )

    def record_states(
        self, part: Part, layer: int, sequences: int, x: Tensor, spans: Sequence[tuple[int, int]]
    ) -> None:
        """Record the hidden states x before a block, or, if `layer` is the count of layers, the output of the stack."""
        if self.records(part, layer, ("states",)):
            for sequence in self._sequences(sequences):
                start, stop = spans[sequence]
                self.states[part, layer, sequence] = x[start:stop].detach()[self._rows(stop - start)].clone()

    def record_weights(self, part: Part, layer: int, weights: Sequence[Float[Tensor, "heads _n _m"]]) -> None:
        """Record attention weights of each sequence that the model computed without queries and keys."""
        for sequence in self._sequences(len(weights)):
            block = weights[sequence].detach()
            chosen = block[self._heads(len(block))][:, self._rows(block.shape[1])]
            self.attention[part, layer, sequence] = AttentionTrace(scale=1.0, weights=chosen)

    def _sequences(self, count: int) -> Sequence[int]:
        return check_indices("trace: sequences", self.sequences, count)

    def _heads(self, count: int) -> Tensor:
        return torch.tensor(check_indices("trace: heads", self.heads, count))

    def _rows(self, count: int) -> Tensor:
        """Return the selected rows that exist in a sequence of `count` rows."""
        return torch.tensor([row for row in (range(count) if self.rows is None else self.rows) if row < count]).long()


def check_indices(what: str, indices: Sequence[int] | None, count: int) -> Sequence[int]:
    """Return the indices, or 0 to count - 1 if they are None.

    Args:
        what: Beginning of the error message.

    Raises:
        HeedfulError: If an index is negative, or not below `count`.
    """
    if indices is None:
        return range(count)
    if wrong := [index for index in indices if not 0 <= index < count]:
        raise HeedfulError(f"{what} {wrong[:5]} do not exist; give numbers from 0 to {count - 1}")
    return indices
