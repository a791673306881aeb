"""CUDA graphs: the kernel launches of a forward pass over a few texts, recorded once and replayed for each batch.

For a few short texts, a GPU waits for the CPU, which launches some hundred kernels of a few microseconds each. A graph
is a single launch. Graphs are recorded for the numbers of rows in GRAPH_ROWS. A batch uses the next larger graph: its
unused rows at the end are one more sequence, and the bounds of all sequences are a tensor on the GPU. Recording
requires that the forward pass copies nothing between CPU and GPU; tests/infer/test_cuda_graphs.py checks that, and
tests/gpu records and replays graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.model.kv_cache import KVCache
from heedful.model.stack import Transformer
from heedful.nn.cuda_graph import record
from heedful.nn.layout import Layout
from heedful.nn.positions import DisentangledPosition, RotaryPosition
from heedful.packed import Packed

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

MAX_TOKENS = 512  # tokens of the largest batch that a graph computes
MAX_TEXTS = 32  # texts in the largest batch that a graph computes
# numbers of rows with a graph of their own: a batch leaves at most a quarter of the rows unused, or 7
GRAPH_ROWS = (*range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, MAX_TOKENS + 1, 64))
MIN_BATCHES = 3  # batches of its size before a graph is recorded: recording takes as long as dozens of batches


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GraphInputs:
    """The input tensors of a graph: the rows of some texts, then unused rows, whose results are ignored."""

    batch: Packed  # one sequence of all rows
    bounds: Int[Tensor, " bounds"]  # bounds of the texts, padded with the number of rows (bounds of empty sequences)

    @classmethod
    def of(cls, rows: int, device: torch.device) -> GraphInputs:
        """Make input tensors whose `rows` rows are one text of zeros."""
        tokens, types = (torch.zeros(rows, dtype=torch.long, device=device) for _ in range(2))
        batch = Packed(tokens=tokens, positions=torch.arange(rows, device=device), types=types, bounds=(0, rows))
        bounds = torch.full((MAX_TEXTS + 2,), rows, dtype=torch.int32, device=device)
        bounds[0] = 0
        return cls(batch=batch, bounds=bounds)

    def load(self, texts: Packed) -> None:
        """Copy texts into the tensors, without waiting for the copies; the unused rows are left unchanged."""
        length, rows = texts.bounds[-1], self.batch.bounds[-1]
        self.batch.tokens[:length].copy_(texts.tokens, non_blocking=True)
        self.batch.positions[:length].copy_(texts.positions, non_blocking=True)
        self.batch.types[:length].copy_(texts.types, non_blocking=True)
        bounds = [*texts.bounds, *[rows] * (len(self.bounds) - len(texts.bounds))]
        self.bounds.copy_(torch.tensor(bounds, dtype=torch.int32), non_blocking=True)


class RecordedLayout(KVCache):
    """A KV cache that stores nothing; it makes attention read the bounds on the device, from `GraphInputs`."""

    def __init__(self, inputs: GraphInputs) -> None:
        super().__init__(1)
        self._span, self._bounds_on_device = (0, inputs.batch.bounds[-1]), inputs.bounds

    def layout(self, batch: Packed) -> Layout:
        """Return a new layout, so that each forward pass computes its plans again from the bounds on the device."""
        return Layout((self._span,), (self._span,), row_bounds=self._bounds_on_device)

    def update(self, layer: int, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the batch unchanged, since there are no earlier ones."""
        return k, v


def rerun(model: Transformer, inputs: GraphInputs) -> Callable[[], Float[Tensor, "rows width"]]:
    """Return a function that computes the last hidden states from the current contents of the inputs."""
    stack = model.encoder or model.decoder
    assert stack is not None and not (model.encoder and model.decoder)
    cache = RecordedLayout(inputs)

    def run() -> Tensor:
        rows: Tensor = stack(model.embedding(inputs.batch), inputs.batch, model.execution, cache=cache)
        return rows

    return run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CudaGraph:
    """A recorded graph with its input and output tensors."""

    graph: torch.cuda.CUDAGraph
    inputs: GraphInputs
    rows: Float[Tensor, "rows width"]  # last hidden states, written by each replay


class CudaGraphs:
    """Computes the last hidden states of small batches by the smallest graph in `sizes` that has enough rows.

    A graph is recorded at the third batch of its size, or by `prepare`. Weights may change in place, but must not move
    to other memory: a graph reads them at the addresses at which they were recorded.
    """

    def __init__(self, model: Transformer, *, max_tokens: int = MAX_TOKENS) -> None:
        self.model = model
        positions = model.embedding.config.positions
        limit = max_tokens if positions is None or positions.limit is None else positions.limit
        self.max_tokens: int = min(max_tokens, limit)  # tokens of the largest batch that a graph computes
        self.sizes: tuple[int, ...] = (*(rows for rows in GRAPH_ROWS if rows < self.max_tokens), self.max_tokens)
        self._recorded: dict[int, CudaGraph] = {}  # by number of rows
        self._batch_counts: Counter[int] = Counter()  # batches so far, by rows of their graph
        self._lock = Lock()  # a graph has one output tensor
        self._pool: _POOL_HANDLE | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the arguments without the graphs, which belong to one process and one model."""
        return {"model": self.model, "max_tokens": self.max_tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CudaGraphs.__init__(self, **state)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.embedding.tokens.weight.device

    def cannot(self, batch: Packed) -> str:
        """Return the reason why no graph can compute a batch, or ""."""
        if reason := self._cannot_record():
            return reason
        if self.model.training or torch.is_grad_enabled():
            return "a recorded graph has no gradients and no dropout"
        if torch.is_autocast_enabled("cuda"):
            return "autocast frees its copies of weights, which a graph would still read"
        if len(batch) > MAX_TEXTS or batch.key_lengths is not None or batch.past_lengths is not None:
            return f"only batches of up to {MAX_TEXTS} texts are recorded"
        if not 0 < batch.bounds[-1] <= self.max_tokens:
            return f"batches of 1 to {self.max_tokens} tokens are recorded, not one of {batch.bounds[-1]}"
        return ""

    def _cannot_record(self) -> str:
        """Return the reason why the model cannot be recorded, or ""."""
        model = self.model
        if self.device.type != "cuda":
            return "the model is not on a CUDA device"
        if self.model.execution.token_pruning is not None:
            return "token pruning computes new bounds of texts on the CPU"
        if type(model) is not Transformer or (model.encoder and model.decoder):
            return "only models with a single stack of layers are recorded"
        stack = model.encoder or model.decoder
        assert stack is not None
        for relation in stack.relations:
            by_length = relation.by_length if isinstance(relation, RotaryPosition) else None
            if by_length is not None and by_length.trained < self.max_tokens:
                return "its rotary frequencies depend on the lengths of texts, which only the GPU knows"
        if isinstance(stack.relations[-1], DisentangledPosition):
            return "it projects distances in each pass; an engine that loads the model by name projects them once"
        return ""

    def __call__(self, batch: Packed) -> Float[Tensor, "rows width"]:
        """Return the last hidden states of a batch on any device, computed by a graph if one is recorded."""
        if self.cannot(batch) or not self._is_frequent(self._rows_for(batch)):
            rows: Tensor = self.model(batch.to(self.device))
            return rows
        self.model.embedding.check(batch)
        with self._lock:
            graph = self._graph_of(self._rows_for(batch))
            graph.inputs.load(batch)
            graph.graph.replay()
            return graph.rows[: batch.bounds[-1]].clone()  # the next replay overwrites the output tensor

    def prepare(self) -> None:
        """Record all graphs now, so that no request waits for a recording; does nothing if the model has no graphs."""
        if self._cannot_record():
            return
        with torch.inference_mode(), self._lock:
            for rows in reversed(self.sizes):  # the largest first: it allocates the memory that all graphs share
                self._graph_of(rows)

    def _rows_for(self, batch: Packed) -> int:
        """Return the rows of the smallest graph that has enough for a batch."""
        count = batch.bounds[-1]
        return next(rows for rows in self.sizes if rows >= count)

    def _is_frequent(self, rows: int) -> bool:
        """Count a batch, and return whether the graph with these rows is recorded or worth recording."""
        with self._lock:
            self._batch_counts[rows] += 1
            return rows in self._recorded or self._batch_counts[rows] >= MIN_BATCHES

    def _graph_of(self, rows: int) -> CudaGraph:
        """Return the graph with these rows; it is recorded now if it is missing. The caller holds the lock."""
        if rows not in self._recorded:
            self._recorded[rows] = self._record(rows)
        return self._recorded[rows]

    def _record(self, rows: int) -> CudaGraph:
        """Record the forward pass of a batch with these rows."""
        # inference tensors could not be overwritten outside inference mode, but a replay overwrites the inputs anywhere
        with torch.inference_mode(False), torch.no_grad():
            inputs = GraphInputs.of(rows, self.device)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph, output = record(rerun(self.model, inputs), self.device, self._pool)
        return CudaGraph(graph=graph, inputs=inputs, rows=output)
