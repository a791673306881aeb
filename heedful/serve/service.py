"""The models of a server: loaded beside the event loop, and exchanged without a request being lost."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.precision import PrecisionOrAuto
from heedful.infer.scheduling.errors import UnavailableError
from heedful.infer.scheduling.limits import QueueLimits
from heedful.infer.scheduling.scheduler import ModelQueue, Scheduler
from heedful.infer.zero_shot import can_classify_zero_shot
from heedful.model.config import Classes
from heedful.search.store import is_index
from heedful.serve.body import BodyBudget
from heedful.serve.metrics import Metrics
from heedful.serve.middleware import HTTPError
from heedful.serve.settings import ServeSettings

SCORED = {"regression": 1, "single_label_classification": 2}  # labels with which a head gives a pair one score
LOG = logging.getLogger("heedful.serve")


def load_models(folder: str, precision: PrecisionOrAuto = "float32", device: str = "auto") -> BundleEngine:
    """An engine from a folder, a run or NAME[@REVISION] on the hub; of an index the engine of its model.

    Raises:
        HeedfulError: If the model cannot be loaded, or an index is to be served in another precision than float32.
    """
    from heedful.infer.engine import Engine

    if is_index(folder):
        from heedful.search.index import SearchIndex  # which needs pyarrow: 20 MB that other servers do not take

        if precision != "float32":
            raise HeedfulError(f"precision is {precision}, but the vectors of the index {folder} are made in float32")
        index = SearchIndex(folder, device=device)
        index.engine.search_index = index
        return index.engine
    return Engine(folder, precision=precision, device=device)


class Service:
    """Models by name, each with its queue in one scheduler."""

    def __init__(
        self,
        runs: dict[str, str],
        settings: ServeSettings | None = None,
        *,
        loader: Callable[[str], BundleEngine] | None = None,
    ) -> None:
        self.settings = settings or ServeSettings()
        self.loader = loader or partial(load_models, precision=self.settings.precision, device=self.settings.device)
        self.runs = runs
        self.metrics = Metrics()
        limits = self.settings.limits
        queue_limits = QueueLimits(
            max_concurrent_requests=limits.max_concurrent_requests,
            max_queued_tokens=limits.max_queued_tokens,
            max_request_tokens=limits.max_request_tokens,
            max_queued_characters=limits.max_queued_characters,
            max_batch_tokens=limits.max_batch_tokens,
        )
        self.queue = Scheduler(queue_limits, readers=limits.tokenization_workers, seen=self.metrics.ran)
        self.metrics.watch(self.queue)
        self.model_queues: dict[str, ModelQueue[BundleEngine]] = {name: self.queue.add_model() for name in runs}
        self.bodies = BodyBudget(
            max_bytes=limits.max_receive_buffer_bytes, share=limits.max_receive_buffer_bytes // limits.max_connections
        )
        self.failed: BaseException | None = None
        self._loads: list[threading.Thread] = []
        self._swaps: set[asyncio.Task[None]] = set()
        self._swapping = asyncio.Lock()  # the latest word is the last that is read

    @property
    def status(self) -> str:
        """ "ok", "loading" or "stopping"."""
        if self.queue.draining:
            return "stopping"
        return "ok" if all(model_queue.engine is not None for model_queue in self.model_queues.values()) else "loading"

    @property
    def loading(self) -> bool:
        """Whether a thread reads a model now."""
        return any(thread.is_alive() for thread in self._loads)

    async def _load(self, name: str) -> BundleEngine:
        """Its engine, read by a thread for which nobody waits when the server ends."""
        engine: Future[BundleEngine] = Future()

        def read() -> None:
            engine.set_running_or_notify_cancel()  # it is not cancelled
            try:
                engine.set_result(self.loader(self.runs[name]))
            except BaseException as error:
                engine.set_exception(error)

        thread = threading.Thread(target=read, name="heedful-load", daemon=True)
        self._loads = [thread, *(earlier for earlier in self._loads if earlier.is_alive())]
        thread.start()
        return await asyncio.wrap_future(engine)

    async def start(self) -> None:
        """Load every model that has not been yet."""
        for name, model_queue in self.model_queues.items():
            if model_queue.engine is None:
                model_queue.engine = await self._load(name)

    async def reload(self, name: str) -> None:
        """Read a model's folder anew, beside the one that answers, and exchange them; requests end as they began."""
        engine = await self._load(name)
        before = self.model_queues[name].engine
        if before is not None and getattr(before, "kind", None) != engine.kind:
            raise HeedfulError(f"{name} had another head before: start the server anew for it")
        self.model_queues[name].engine = engine

    def reload_all(self) -> None:
        """Reload all models; one that cannot be read stays as it is, and the error is logged."""

        async def swap(name: str) -> None:
            try:
                async with self._swapping:
                    await self.reload(name)
                LOG.info("%s", json.dumps({"event": "model_reloaded", "model": name}))
            except Exception as error:
                reason = str(error) if isinstance(error, HeedfulError) else type(error).__name__
                LOG.error("%s", json.dumps({"event": "model_reload_failed", "model": name, "reason": reason}))

        for name in self.model_queues:
            task = asyncio.get_running_loop().create_task(swap(name))
            self._swaps.add(task)
            task.add_done_callback(self._swaps.discard)

    def select_model(self, name: str | None, kinds: Sequence[str] | None) -> tuple[str, ModelQueue[BundleEngine]]:
        """The model of that name, or the first that has one of these kinds of head."""
        if name is not None:
            if name not in self.model_queues:
                raise HTTPError(404, "not_found", "there is no model of this name: GET /info lists them")
            model_queue = self.model_queues[name]
            if model_queue.engine is None:
                raise UnavailableError("the model is loading")
            if not _meets(model_queue, kinds):
                raise HTTPError(
                    422, "validation", f"this model cannot be asked that: its head is {head_kind(model_queue)}"
                )
            return name, model_queue
        for name, model_queue in self.model_queues.items():
            if model_queue.engine is not None and _meets(model_queue, kinds):
                return name, model_queue
        if any(model_queue.engine is None for model_queue in self.model_queues.values()):
            raise UnavailableError("the model is loading")
        raise HTTPError(422, "validation", "no model of this server can be asked that: GET /info lists what can")


def head_kind(model_queue: ModelQueue[BundleEngine]) -> str:
    """Return the kind of the model's head; "" while it is loading."""
    return str(getattr(model_queue.engine, "kind", ""))


def head_kinds(model_queue: ModelQueue[BundleEngine]) -> tuple[str, ...]:
    """Return the kind of the head; "rank" if it gives a pair of texts one score; "zero_shot" if it knows entailment.

    "search" if it is the model of an index.
    """
    kind, engine = head_kind(model_queue), model_queue.engine
    if kind == "sequence_classification" and engine is not None:
        head = engine.loaded.config.head
        assert isinstance(head, Classes)
        ranks = ("rank",) if SCORED.get(head.problem_type) == len(head.labels) else ()
        return (kind, *ranks, *(("zero_shot",) if can_classify_zero_shot(head) else ()))
    return (kind, "search") if getattr(engine, "search_index", None) is not None else (kind,)


def _meets(model_queue: ModelQueue[BundleEngine], kinds: Sequence[str] | None) -> bool:
    return kinds is None or bool({*head_kinds(model_queue)} & {*kinds})
