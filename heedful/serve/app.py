"""The ASGI application: routes that parse a body by its type, call a model, and stop when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive

from heedful._version import __version__
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.scheduling.errors import InferenceFailedError
from heedful.model.config import Classes
from heedful.page.assets import WEB
from heedful.search.store import is_index
from heedful.serve import open_inference, openapi, requests
from heedful.serve.body import check_body_headers, parse_body, read_body
from heedful.serve.context import RequestContext
from heedful.serve.middleware import (
    AccessMiddleware,
    ClientDisconnectedError,
    HTTPError,
    RequestLog,
    to_http_error,
)
from heedful.serve.routes import Endpoint, endpoints
from heedful.serve.service import Service, head_kind, head_kinds
from heedful.serve.settings import LOOPBACK

OWN = Path(__file__).parent / "web"
FILES = {  # by path
    "/": (OWN / "index.html", "text/html"),
    "/web/try.html": (OWN / "index.html", "text/html"),
    "/web/search.html": (OWN / "search.html", "text/html"),
    "/web/client.js": (OWN / "client.js", "text/javascript"),
    "/web/page.js": (OWN / "page.js", "text/javascript"),
    "/web/search.js": (OWN / "search.js", "text/javascript"),
    "/web/search.css": (OWN / "search.css", "text/css"),
    "/web/rows.js": (WEB / "rows.js", "text/javascript"),
    "/web/page.css": (WEB / "page.css", "text/css"),
}
VALUES_PER_TOKEN = 6  # JSON values of a body, for each token that a request may have
Respond = Callable[[Request], Awaitable[Response]]
Ask = Callable[[RequestContext, Request, Any], Awaitable[object]]
View = dict[str, object]


def create_app(
    service: Service, *, keys: tuple[bytes, ...] = (), hosts: tuple[str, ...] | None = LOOPBACK, wait: bool = True
) -> Starlette:
    """Return the ASGI application of a service; with `wait`, its startup ends when all models are loaded."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if wait:
            try:
                await service.start()
            except BaseException as error:
                service.failed = error
                raise
        yield
        await asyncio.to_thread(service.queue.close)

    guard = Middleware(AccessMiddleware, settings=service.settings, keys=keys, hosts=hosts, seen=service.metrics.saw)
    return Starlette(
        routes=[*_questions(service), *_protocol(service), *_views(service, bool(keys)), *_pages(service)],
        middleware=[guard],
        exception_handlers={HTTPException: _no_route},
        lifespan=lifespan,
    )


def _questions(service: Service) -> list[Route]:
    def ask(question: Endpoint) -> Ask:
        return lambda call, request, body: question.handler(call, body)

    return [_post(service, endpoint.path, endpoint.body, ask(endpoint)) for endpoint in endpoints()]


def _post(service: Service, path: str, body_type: type[Struct], ask: Ask) -> Route:
    max_values = VALUES_PER_TOKEN * service.settings.limits.max_request_tokens

    async def endpoint(request: Request) -> Response:
        record = _record(request, path)
        timeouts, limits = service.settings.timeouts, service.settings.limits
        check_body_headers(record, limits.max_body_bytes)
        call = RequestContext(service=service, record=record)
        raw = await read_body(request.receive, limits.max_body_bytes, timeouts.body_seconds, service.bodies)
        try:
            body = parse_body(body_type, raw, max_values)
            del raw  # it may be large, and what follows may take long
            return _json(await _while_connected(request.receive, ask(call, request, body)))
        except (HTTPError, ClientDisconnectedError, asyncio.CancelledError):
            raise
        except Exception as error:
            record.reason = error.reason if isinstance(error, InferenceFailedError) else type(error).__name__
            raise to_http_error(error) from None

    return Route(path, endpoint, methods=["POST"])


async def _while_connected(receive: Receive, work: Awaitable[object]) -> object:
    """Return the result of `work`; cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.cancelled():  # by the queue, which was the first to see that the client left
            raise ClientDisconnectedError
        return task.result()
    finally:
        left.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _record(request: Request, route: str) -> RequestLog:
    record: RequestLog = request.scope["heedful"]
    record.route = route
    return record


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is no such path: GET /openapi.json lists them", 405: "this path has another method"}
    raise HTTPError(
        error.status_code,
        "not_found" if error.status_code == 404 else "validation",
        messages.get(error.status_code, "it cannot be answered"),
        list((error.headers or {}).items()),
    )


# -- the Open Inference Protocol ------------------------------------------------------------------------------------


def _protocol(service: Service) -> list[Route]:
    async def infer(call: RequestContext, request: Request, body: requests.InferBody) -> View:
        return await open_inference.infer(call, request.path_params["name"], body)

    def facts(request: Request) -> View:
        name, model_queue = service.select_model(request.path_params["name"], None)
        return {
            "name": name,
            "platform": "heedful",
            "inputs": open_inference.input_tensors(head_kind(model_queue)),
            "outputs": open_inference.output_tensors(head_kind(model_queue), _labels(model_queue.engine)),
        }

    def ready(request: Request) -> View:
        name = request.path_params["name"]
        if name not in service.model_queues:
            service.select_model(name, None)  # which says so
        return {"ready": service.model_queues[name].engine is not None and not service.queue.draining}

    def server(request: Request) -> View:
        return {"name": "heedful", "version": __version__, "extensions": []}

    return [
        _post(service, "/v2/models/{name}/infer", requests.InferBody, infer),
        _get("/v2/models/{name}", facts),
        _get("/v2/models/{name}/ready", ready, lambda shown: 200 if shown["ready"] else 503),
        _get("/v2", server),
    ]


# -- what is shown --------------------------------------------------------------------------------------------------


def _get(path: str, show: Callable[[Request], View], status: Callable[[View], int] = lambda shown: 200) -> Route:
    async def endpoint(request: Request) -> Response:
        _record(request, path)
        try:
            shown = show(request)
            return _json(shown, status(shown))
        except (HTTPError, HeedfulError) as error:
            raise to_http_error(error) from None
        except Exception as error:
            raise to_http_error(error) from None

    return Route(path, endpoint, methods=["GET"])


def _views(service: Service, keys: bool) -> list[Route]:
    document = orjson.dumps(openapi.document(__version__, keys))

    def fit(shown: View | None = None) -> int:
        return 200 if service.status == "ok" else 503

    async def metrics(request: Request) -> Response:
        _record(request, "/metrics")
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    def models(request: Request) -> View:
        about = {"object": "model", "created": 0, "owned_by": "heedful"}
        return {"object": "list", "data": [{"id": name} | about for name in service.model_queues]}

    return [
        _get("/v1/models", models),
        _get("/info", lambda request: info(service, request.query_params.get("model"))),
        _get("/health", lambda request: {"status": service.status}, fit),
        *(_get(path, lambda request: {"live": True}) for path in ("/live", "/v2/health/live")),
        *(_get(path, lambda request: {"ready": fit() == 200}, fit) for path in ("/ready", "/v2/health/ready")),
        _fixed("/openapi.json", document, "application/json"),
        Route("/metrics", metrics, methods=["GET"]),
    ]


def info(service: Service, name: str | None) -> View:
    """Describe a model and its routes, without paths of this machine."""
    name, model_queue = service.select_model(name, None)
    engine = model_queue.engine
    assert engine is not None, "select_model refuses models that are loading"
    limits, loaded = service.settings.limits, engine.loaded
    labels = _labels(engine)
    model_type: dict[str, Any] = {engine.kind: {}}
    if engine.kind == "embedding":
        model_type = {"embedding": {"pooling": getattr(loaded.config.head, "pooling", None)}}
    elif isinstance(head := loaded.config.head, Classes):
        numbered = dict(enumerate(labels or []))
        model_type = {"classifier": {"id2label": {str(id): label for id, label in numbered.items()}}}
        model_type["classifier"]["label2id"] = {label: id for id, label in numbered.items()}
        model_type["classifier"]["problem_type"] = head.problem_type
    return {
        "model_id": name,
        "model_dtype": engine.plan.precision if engine.plan else str(next(loaded.parameters()).dtype)[len("torch.") :],
        "model_type": model_type,
        "family": loaded.config.family,
        "parameters": engine.parameters,
        "routes": [
            endpoint.path
            for endpoint in endpoints()
            if endpoint.kinds is None or set(head_kinds(model_queue)) & {*endpoint.kinds}
        ],
        "labels": labels,
        "index": _index_facts(engine),
        "max_input_length": engine.limit,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_concurrent_requests": limits.max_concurrent_requests,
        "max_client_batch_size": limits.max_client_batch_size,
        "max_connections": limits.max_connections,
        "max_connections_per_address": service.settings.connections_per_address,
        "auto_truncate": engine.kind == "embedding",
        "models": list(service.model_queues),
        "version": __version__,
    }


def _index_facts(engine: BundleEngine) -> View | None:
    index: Any = engine.search_index
    return None if index is None else {"documents": len(index), "passages": index.passages}


def _labels(engine: BundleEngine | None) -> list[str] | None:
    from heedful.tasks.label_answers import unique_label_names

    labels = None if engine is None else getattr(engine.loaded.config.head, "labels", None)
    return None if labels is None else unique_label_names(labels)


def _pages(service: Service) -> list[Route]:
    """Return the routes of the pages' files; "/" is the search page if the first model is that of an index."""
    first = next(iter(service.runs.values()), "")
    files = FILES | ({"/": FILES["/web/search.html"]} if is_index(first) else {})
    return [_fixed(path, file.read_bytes(), kind) for path, (file, kind) in files.items()]


def _fixed(path: str, content: bytes, kind: str) -> Route:
    async def endpoint(request: Request) -> Response:
        _record(request, path)
        return Response(content, media_type=kind)

    return Route(path, endpoint, methods=["GET"])
