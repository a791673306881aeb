"""CUDA graphs: what the host says to the GPU for a text alone is recorded once for each length, and replayed.

For one short text a GPU waits for its host, which starts some hundred kernels of a few microseconds; a graph is one
start. tests/infer/test_graphs.py shows that nothing passes between host and GPU while a text is computed, which is what
recording asks for; tests/gpu records and replays.
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

LONGEST, MOST, WARM = 256, 256, 3  # tokens of a text; graphs that are kept; runs before one is recorded
TEXTS = 3  # of one length until it is recorded, which takes as long as dozens of texts


class CapturedLayout(KVCache):
    """Remembers no rows, but one layout, so that kernels plan on the host once and not in each run."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(len(layout.queries))
        self._layout = layout

    def layout(self, batch: Packed) -> Layout:
        """The one that was given."""
        return self._layout

    def update(self, layer: int, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """The rows' own keys and values."""
        return k, v


def rerun(model: Transformer, batch: Packed) -> Callable[[], Float[Tensor, "rows width"]]:
    """Return a function that computes the model's rows from the current contents of the batch's tensors."""
    stack = model.encoder or model.decoder
    assert stack is not None and not (model.encoder and model.decoder)
    known = CapturedLayout(Layout.within(batch))

    def run() -> Tensor:
        rows: Tensor = stack(model.embedding(batch), batch, model.execution, cache=known)
        return rows

    return run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CudaGraph:
    """A graph, what it reads and what it writes."""

    graph: torch.cuda.CUDAGraph
    batch: Packed
    rows: Float[Tensor, "rows width"]


class CudaGraphs:
    """The rows of one text at a time, by a graph for each number of tokens.

    A graph is recorded when the third text of that length comes, or by `prepare`.

    Weights may change in place, but not move: what was recorded reads them where they lie.
    """

    def __init__(self, model: Transformer, *, longest: int = LONGEST, most: int = MOST) -> None:
        self.model = model
        self.longest = longest
        self.most = most
        self._recorded: OrderedDict[int, CudaGraph] = OrderedDict()  # least recently used first
        self._texts: Counter[int] = Counter()  # that came, by number of tokens
        self._lock = Lock()  # a graph writes to one place
        self._pool: _POOL_HANDLE | None = None

    def __getstate__(self) -> dict[str, object]:
        """A copy records anew: a graph is of one process, and reads the weights of one model."""
        return {"model": self.model, "longest": self.longest, "most": self.most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        CudaGraphs.__init__(self, **state)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.embedding.tokens.weight.device

    def cannot(self, batch: Packed) -> str:
        """Why a batch has to be computed in the usual way, or nothing."""
        if self.device.type != "cuda":
            return "graphs are CUDA's"
        if type(self.model) is not Transformer or (self.model.encoder and self.model.decoder):
            return "only one stack of layers is recorded"
        if self.model.training or torch.is_grad_enabled():
            return "what is recorded has no gradients and no dropout"
        if torch.is_autocast_enabled("cuda"):
            return "autocast's copies of weights, which would be recorded, go with it"
        if len(batch) != 1 or batch.key_lengths is not None or batch.past_lengths is not None:
            return "only a text alone is recorded"
        if not 0 < batch.bounds[-1] <= self.longest:
            return f"a text of 1 to {self.longest} tokens is recorded, not one of {batch.bounds[-1]}"
        return ""

    def __call__(self, batch: Packed) -> Float[Tensor, "rows width"]:
        """The model's rows of a batch that lies anywhere; in the usual way where that has to be."""
        if self.cannot(batch) or not self._is_frequent(batch.bounds[-1]):
            usual: Tensor = self.model(batch.to(self.device))
            return usual
        with self._lock:
            recorded = self._of(batch)
            recorded.batch.tokens.copy_(batch.tokens, non_blocking=True)
            recorded.batch.types.copy_(batch.types, non_blocking=True)
            recorded.graph.replay()
            return recorded.rows.clone()  # the next one is written to the same place

    def prepare(self, lengths: Iterable[int]) -> None:
        """Record graphs for texts of these numbers of tokens now, so that no request waits for it."""
        with torch.inference_mode(), self._lock:
            for length in lengths:
                self._of(Packed.of([[0] * length]))

    def _is_frequent(self, length: int) -> bool:
        """Count a text, and return whether the graph of its length is there, or worth recording."""
        with self._lock:
            self._texts[length] += 1
            return length in self._recorded or self._texts[length] >= TEXTS

    def _of(self, batch: Packed) -> CudaGraph:
        length = batch.bounds[-1]
        if length in self._recorded:
            self._recorded.move_to_end(length)
        else:
            self._recorded[length] = self._record(batch)
            if len(self._recorded) > self.most:
                self._recorded.popitem(last=False)
        return self._recorded[length]

    def _record(self, batch: Packed) -> CudaGraph:
        device = self.device
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):  # copies are made in any mode
            own = Packed(
                tokens=batch.tokens.to(device, copy=True),
                positions=batch.positions.to(device, copy=True),
                types=batch.types.to(device, copy=True),
                bounds=batch.bounds,
            )
            run = rerun(self.model, own)
            beside = torch.cuda.Stream(device)
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):
                for _ in range(WARM):  # plans are made, libraries choose and reserve
                    run()
            torch.cuda.current_stream(device).wait_stream(beside)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                rows = run()
        return CudaGraph(graph=graph, batch=own, rows=rows)
