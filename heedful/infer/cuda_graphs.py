"""CUDA graphs: the kernel launches for a single text are recorded once for each length, and replayed.

For one short text a GPU waits for its host, which launches some hundred kernels of a few microseconds each. A graph is
one launch. Recording requires that nothing is copied between host and GPU during the forward pass:
tests/infer/test_cuda_graphs.py checks that; tests/gpu records and replays.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.model.kv_cache import KVCache
from heedful.model.stack import Transformer
from heedful.nn.layout import Layout
from heedful.packed import Packed

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

MAX_TOKENS = 256  # longest text that is recorded
MAX_GRAPHS = 256  # graphs that are kept; the least recently used is dropped
WARMUP_RUNS = 3  # runs before one is recorded
MIN_TEXTS = 3  # texts of one length before it is recorded, which takes as long as dozens of texts


class CapturedLayout(KVCache):
    """A KV cache that stores no keys or values, but one layout: kernels then plan on the host only once."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(len(layout.queries))
        self._layout = layout

    def layout(self, batch: Packed) -> Layout:
        """Return the captured layout."""
        return self._layout

    def update(self, layer: int, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the batch, without earlier ones."""
        return k, v


def rerun(model: Transformer, batch: Packed) -> Callable[[], Float[Tensor, "rows width"]]:
    """Return a function that computes the last hidden states from the current contents of the batch's tensors."""
    stack = model.encoder or model.decoder
    assert stack is not None and not (model.encoder and model.decoder)
    captured = CapturedLayout(Layout.within(batch))

    def run() -> Tensor:
        rows: Tensor = stack(model.embedding(batch), batch, model.execution, cache=captured)
        return rows

    return run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CudaGraph:
    """A recorded graph."""

    graph: torch.cuda.CUDAGraph
    batch: Packed  # the tensors that the graph reads
    rows: Float[Tensor, "rows width"]  # the tensor that the graph writes


class CudaGraphs:
    """Computes the last hidden states of a single text, with a graph for each number of tokens.

    A graph is recorded at the third text of its length, or by `prepare`. Weights may change in place, but must not
    move to other memory: a graph reads them at their recorded addresses.
    """

    def __init__(self, model: Transformer, *, max_tokens: int = MAX_TOKENS, max_graphs: int = MAX_GRAPHS) -> None:
        self.model = model
        self.max_tokens = max_tokens
        self.max_graphs = max_graphs
        self._recorded: OrderedDict[int, CudaGraph] = OrderedDict()  # by number of tokens, least recently used first
        self._text_counts: Counter[int] = Counter()  # texts so far, by number of tokens
        self._lock = Lock()  # a graph has one output tensor
        self._pool: _POOL_HANDLE | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the arguments without the graphs, which belong to one process and one model."""
        return {"model": self.model, "max_tokens": self.max_tokens, "max_graphs": self.max_graphs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CudaGraphs.__init__(self, **state)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.embedding.tokens.weight.device

    def cannot(self, batch: Packed) -> str:
        """Return why a batch cannot be computed by a graph, or ""."""
        if self.device.type != "cuda":
            return "the model is not on a CUDA device"
        if type(self.model) is not Transformer or (self.model.encoder and self.model.decoder):
            return "only one stack of layers is recorded"
        if self.model.training or torch.is_grad_enabled():
            return "what is recorded has no gradients and no dropout"
        if torch.is_autocast_enabled("cuda"):
            return "autocast frees its copies of weights, which a graph would still read"
        if len(batch) != 1 or batch.key_lengths is not None or batch.past_lengths is not None:
            return "only a single text is recorded"
        if not 0 < batch.bounds[-1] <= self.max_tokens:
            return f"a text of 1 to {self.max_tokens} tokens is recorded, not one of {batch.bounds[-1]}"
        return ""

    def __call__(self, batch: Packed) -> Float[Tensor, "rows width"]:
        """Return the last hidden states of a batch on any device, by a graph if there is one for it."""
        if self.cannot(batch) or not self._is_frequent(batch.bounds[-1]):
            rows: Tensor = self.model(batch.to(self.device))
            return rows
        with self._lock:
            recorded = self._graph_for(batch)
            recorded.batch.tokens.copy_(batch.tokens, non_blocking=True)
            recorded.batch.types.copy_(batch.types, non_blocking=True)
            recorded.graph.replay()
            return recorded.rows.clone()  # the next replay overwrites the output tensor

    def prepare(self, lengths: Iterable[int]) -> None:
        """Record graphs for texts with these numbers of tokens now, so that no request waits for it."""
        with torch.inference_mode(), self._lock:
            for length in lengths:
                self._graph_for(Packed.of([[0] * length]))

    def _is_frequent(self, length: int) -> bool:
        """Count a text of this length, and return whether its graph is recorded or worth recording."""
        with self._lock:
            self._text_counts[length] += 1
            return length in self._recorded or self._text_counts[length] >= MIN_TEXTS

    def _graph_for(self, batch: Packed) -> CudaGraph:
        """Return the graph for the length of a batch, recorded now if it is missing. The caller holds the lock."""
        length = batch.bounds[-1]
        if length in self._recorded:
            self._recorded.move_to_end(length)
        else:
            self._recorded[length] = self._record(batch)
            if len(self._recorded) > self.max_graphs:
                self._recorded.popitem(last=False)
        return self._recorded[length]

    def _record(self, batch: Packed) -> CudaGraph:
        """Record the forward pass of a batch on copies of its tensors."""
        device = self.device
        # replays copy texts into these tensors in any mode, which inference tensors do not allow
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            graph_batch = Packed(
                tokens=batch.tokens.to(device, copy=True),
                positions=batch.positions.to(device, copy=True),
                types=batch.types.to(device, copy=True),
                bounds=batch.bounds,
            )
            run = rerun(self.model, graph_batch)
            warmup_stream = torch.cuda.Stream(device)
            warmup_stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(warmup_stream):
                for _ in range(WARMUP_RUNS):  # kernels plan, libraries choose algorithms and allocate workspaces
                    run()
            torch.cuda.current_stream(device).wait_stream(warmup_stream)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                rows = run()
        return CudaGraph(graph=graph, batch=graph_batch, rows=rows)
