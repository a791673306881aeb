"""`Service`: the models of a server. Threads load and reload models, and a reload interrupts no request."""

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

# number of labels of a head that can rank texts, by problem type; see `heedful.search.rerank`
RANKING_LABELS = {"regression": 1, "single_label_classification": 2}
LOG = logging.getLogger("heedful.serve")


def load_models(folder: str, precision: PrecisionOrAuto | None = None, device: str = "auto") -> BundleEngine:
    """Return the engine of a model: a folder, a run, NAME[@REVISION] on the hub, or the model of a search index.

    On a GPU, the CUDA graphs for small batches are recorded, too.

    Raises:
        HeedfulError: If the model cannot be loaded, or another precision than float32 is set for an index.
    """
    from heedful.infer.engine import Engine

    if is_index(folder):
        from heedful.search.index import SearchIndex  # imports pyarrow, which takes 20 MB of memory

        if precision not in (None, "float32"):
            raise HeedfulError(f"precision is {precision}, but the vectors of the index {folder} are made in float32")
        index = SearchIndex(folder, device=device)
        index.engine.search_index = index
        engine = index.engine
    else:
        engine = Engine(folder, precision=precision, device=device)
    engine.prepare_graphs()
    return engine


class Service:
    """The models of a server, each with a queue in the same scheduler.

    Attributes:
        runs: Folders of the models by name.
        model_queues: Queues of the models by name.
        bodies: Memory budget of request bodies, over all connections.
        failed: The error that ended the loading of models, or None.
    """

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
        self.scheduler = Scheduler(
            queue_limits, tokenizer_threads=limits.tokenization_workers, on_batch=self.metrics.count_batch
        )
        self.metrics.add_scheduler(self.scheduler)
        self.model_queues: dict[str, ModelQueue[BundleEngine]] = {name: self.scheduler.add_model() for name in runs}
        self.bodies = BodyBudget(
            max_bytes=limits.max_receive_buffer_bytes, share=limits.max_receive_buffer_bytes // limits.max_connections
        )
        self.failed: BaseException | None = None
        self._load_threads: list[threading.Thread] = []
        self._reloads: set[asyncio.Task[None]] = set()
        self._reload_lock = asyncio.Lock()  # one reload at a time, so that the latest one determines the models

    @property
    def status(self) -> str:
        """The status of the server: "ok", "loading" or "stopping"."""
        if self.scheduler.draining:
            return "stopping"
        return "ok" if all(model_queue.engine is not None for model_queue in self.model_queues.values()) else "loading"

    @property
    def loading(self) -> bool:
        """Whether a thread is loading a model."""
        return any(thread.is_alive() for thread in self._load_threads)

    async def _load(self, name: str) -> BundleEngine:
        """Load a model in a daemon thread, so that the server can end meanwhile, and return the engine."""
        engine: Future[BundleEngine] = Future()

        def load() -> None:
            engine.set_running_or_notify_cancel()  # from now on the future cannot be cancelled
            try:
                engine.set_result(self.loader(self.runs[name]))
            except BaseException as error:
                engine.set_exception(error)

        thread = threading.Thread(target=load, name="heedful-load", daemon=True)
        self._load_threads = [thread, *(earlier for earlier in self._load_threads if earlier.is_alive())]
        thread.start()
        return await asyncio.wrap_future(engine)

    async def start(self) -> None:
        """Load all models that are not loaded yet."""
        for name, model_queue in self.model_queues.items():
            if model_queue.engine is None:
                self._use(name, await self._load(name))

    async def reload(self, name: str) -> None:
        """Load a model again while its old engine serves requests; then serve new requests with the new engine.

        Raises:
            HeedfulError: If the model cannot be loaded, or its head has another kind than before.
        """
        engine = await self._load(name)
        old_engine = self.model_queues[name].engine
        if old_engine is not None and getattr(old_engine, "kind", None) != engine.kind:
            raise HeedfulError(f"{name} has another kind of head than before: restart the server to load it")
        self._use(name, engine)

    def _use(self, name: str, engine: BundleEngine) -> None:
        """Answer new requests with an engine."""
        self.metrics.observe_vectors(name, engine)
        self.model_queues[name].engine = engine

    def reload_all(self) -> None:
        """Reload all models in the background. If that fails, the old engine remains, and the error is logged."""

        async def reload(name: str) -> None:
            try:
                async with self._reload_lock:
                    await self.reload(name)
                LOG.info("%s", json.dumps({"event": "model_reloaded", "model": name}))
            except Exception as error:
                reason = str(error) if isinstance(error, HeedfulError) else f"{type(error).__name__}: {error}"
                LOG.error("%s", json.dumps({"event": "model_reload_failed", "model": name, "reason": reason}))

        for name in self.model_queues:
            task = asyncio.get_running_loop().create_task(reload(name))
            self._reloads.add(task)  # the event loop keeps only a weak reference to a task
            task.add_done_callback(self._reloads.discard)

    def select_model(self, name: str | None, kinds: Sequence[str] | None) -> tuple[str, ModelQueue[BundleEngine]]:
        """Return the name and the queue of a model.

        Args:
            name: Name of the model. If None, the first model with one of the kinds is selected.
            kinds: The model must have one of these kinds, see `head_kinds`. If None, any model can be selected.

        Raises:
            HTTPError: If no model has this name, or none has such a kind.
            UnavailableError: If the model is loading.
        """
        if name is not None:
            if name not in self.model_queues:
                raise HTTPError(404, "not_found", "there is no model of this name: GET /info lists them")
            model_queue = self.model_queues[name]
            if model_queue.engine is None:
                raise UnavailableError("the model is loading")
            if not _has_kind(model_queue, kinds):
                raise HTTPError(
                    422, "validation", f"this route does not serve the model: its head is {head_kind(model_queue)}"
                )
            return name, model_queue
        for name, model_queue in self.model_queues.items():
            if model_queue.engine is not None and _has_kind(model_queue, kinds):
                return name, model_queue
        if any(model_queue.engine is None for model_queue in self.model_queues.values()):
            raise UnavailableError("the model is loading")
        raise HTTPError(422, "validation", "this route serves no model of this server: GET /info lists its routes")


def head_kind(model_queue: ModelQueue[BundleEngine]) -> str:
    """Return the kind of a model's head; "" while the model is loading."""
    return str(getattr(model_queue.engine, "kind", ""))


def head_kinds(model_queue: ModelQueue[BundleEngine]) -> tuple[str, ...]:
    """Return the kind of a model's head, and further kinds by which routes select models.

    The further kinds are "rank" for a model that can rank texts, "zero_shot" for a model that scores entailment, and
    "search" for the model of an index.
    """
    kind = head_kind(model_queue)
    engine = model_queue.engine
    if kind == "sequence_classification" and engine is not None:
        head = engine.loaded.config.head
        assert isinstance(head, Classes)
        ranks = ("rank",) if RANKING_LABELS.get(head.problem_type) == len(head.labels) else ()
        zero_shot = ("zero_shot",) if can_classify_zero_shot(head, engine.loaded.pairs) else ()
        return (kind, *ranks, *zero_shot)
    return (kind, "search") if getattr(engine, "search_index", None) is not None else (kind,)


def _has_kind(model_queue: ModelQueue[BundleEngine], kinds: Sequence[str] | None) -> bool:
    """Return whether a model has one of the kinds; always True if `kinds` is None."""
    return kinds is None or bool({*head_kinds(model_queue)} & {*kinds})
