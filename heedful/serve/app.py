"""`create_app`: the ASGI application of a service. It parses request bodies, calls handlers and sends responses.

If a client disconnects, the work for its request is cancelled.
"""

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
from heedful.infer.scheduling.errors import InferenceFailedError, RequestRefusedError, failure_reason
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

SERVE_WEB = Path(__file__).parent / "web"
FILES = {  # (file, media type) by path
    "/": (SERVE_WEB / "index.html", "text/html"),
    "/web/try.html": (SERVE_WEB / "index.html", "text/html"),
    "/web/search.html": (SERVE_WEB / "search.html", "text/html"),
    "/web/client.js": (SERVE_WEB / "client.js", "text/javascript"),
    "/web/page.js": (SERVE_WEB / "page.js", "text/javascript"),
    "/web/search.js": (SERVE_WEB / "search.js", "text/javascript"),
    "/web/search.css": (SERVE_WEB / "search.css", "text/css"),
    "/web/rows.js": (WEB / "rows.js", "text/javascript"),
    "/web/page.css": (WEB / "page.css", "text/css"),
}
VALUES_PER_TOKEN = 6  # maximum JSON values of a body per token of limits.max_request_tokens
PostHandler = Callable[[RequestContext, Request, Any], Awaitable[object]]
View = dict[str, object]  # content of a response to GET


def create_app(
    service: Service, *, keys: tuple[bytes, ...] = (), hosts: tuple[str, ...] | None = LOOPBACK, wait: bool = True
) -> Starlette:
    """Return the ASGI application of a service.

    Args:
        service: The models.
        keys: API keys. If empty, requests need no key.
        hosts: Allowed Host headers, without ports. If None, any Host header is allowed.
        wait: Whether the application loads all models at startup. If False, the caller loads them.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        if wait:
            try:
                await service.start()
            except BaseException as error:
                service.failed = error
                raise
        yield
        await asyncio.to_thread(service.scheduler.close)

    access = Middleware(
        AccessMiddleware,
        settings=service.settings,
        keys=keys,
        hosts=hosts,
        on_response=service.metrics.count_request,
    )
    return Starlette(
        routes=[
            *_model_routes(service),
            *_open_inference_routes(service),
            *_view_routes(service, bool(keys)),
            *_page_routes(service),
        ],
        middleware=[access],
        exception_handlers={HTTPException: _raise_http_error},
        lifespan=lifespan,
    )


def _model_routes(service: Service) -> list[Route]:
    """Return the routes that use a model, as defined in routes.py."""

    def post_handler(endpoint: Endpoint) -> PostHandler:
        return lambda context, request, body: endpoint.handler(context, body)

    return [_post(service, endpoint.path, endpoint.body, post_handler(endpoint)) for endpoint in endpoints()]


def _post(service: Service, path: str, body_type: type[Struct], handler: PostHandler) -> Route:
    """Return a route that parses a JSON body as `body_type`, and responds with the result of the handler."""
    max_values = VALUES_PER_TOKEN * service.settings.limits.max_request_tokens

    async def respond(request: Request) -> Response:
        record = _set_route(request, path)
        limits = service.settings.limits
        timeouts = service.settings.timeouts
        check_body_headers(record, limits.max_body_bytes)
        context = RequestContext(service=service, record=record)
        raw = await read_body(request.receive, limits.max_body_bytes, timeouts.body_seconds, service.bodies)
        try:
            body = parse_body(body_type, raw, max_values)
            del raw  # frees the memory of a large body before the handler runs
            return _json_response(await _while_connected(request.receive, handler(context, request, body)))
        except (HTTPError, ClientDisconnectedError, asyncio.CancelledError):
            raise
        except Exception as error:
            record.reason = _reason(error)
            raise to_http_error(error) from None

    return Route(path, respond, methods=["POST"])


def _reason(error: Exception) -> str:
    """Return why a request failed, for its log entry; never the error's message, which may quote a text."""
    if isinstance(error, InferenceFailedError):
        return error.reason
    if isinstance(error, HeedfulError | RequestRefusedError):  # the response to the client has the message
        return type(error).__name__
    return failure_reason(error)


async def _while_connected(receive: Receive, work: Awaitable[object]) -> object:
    """Return the result of `work`, or cancel `work` when the client disconnects.

    Raises:
        ClientDisconnectedError: If the client disconnects first.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.cancelled():  # the scheduler may cancel the task before this function does
            raise ClientDisconnectedError
        return task.result()
    finally:
        disconnected.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _set_route(request: Request, route: str) -> RequestLog:
    """Set the route in the log entry of a request, and return the entry."""
    record: RequestLog = request.scope["heedful"]
    record.route = route
    return record


def _json_response(content: object, status: int = 200) -> Response:
    """Return a JSON response. The content may contain NumPy arrays."""
    return Response(orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json")


async def _raise_http_error(request: Request, error: Exception) -> Response:
    """Convert Starlette's error for an unknown path or method to an HTTPError, and raise it."""
    assert isinstance(error, HTTPException)
    messages = {
        404: "there is no such path: GET /openapi.json lists them",
        405: "this path does not have this method: GET /openapi.json lists its methods",
    }
    raise HTTPError(
        error.status_code,
        "not_found" if error.status_code == 404 else "validation",
        messages.get(error.status_code, "the request cannot be answered"),
        list((error.headers or {}).items()),
    )


# -- the Open Inference Protocol ------------------------------------------------------------------------------------


def _open_inference_routes(service: Service) -> list[Route]:
    """Return the routes of the Open Inference Protocol, except the health routes."""

    async def infer(context: RequestContext, request: Request, body: requests.InferBody) -> View:
        return await open_inference.infer(context, request.path_params["name"], body)

    def model_facts(request: Request) -> View:
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
            service.select_model(name, None)  # raises the error for an unknown name
        return {"ready": service.model_queues[name].engine is not None and not service.scheduler.draining}

    def server_facts(request: Request) -> View:
        return {"name": "heedful", "version": __version__, "extensions": []}

    return [
        _post(service, "/v2/models/{name}/infer", requests.InferBody, infer),
        _get("/v2/models/{name}", model_facts),
        _get("/v2/models/{name}/ready", ready, lambda view: 200 if view["ready"] else 503),
        _get("/v2", server_facts),
    ]


# -- views: facts about the server and its models -------------------------------------------------------------------


def _get(path: str, make_view: Callable[[Request], View], status: Callable[[View], int] = lambda view: 200) -> Route:
    """Return a route that responds to GET with a view as JSON.

    Args:
        path: The path.
        make_view: Returns the view for a request.
        status: Returns the HTTP status for a view.
    """

    async def respond(request: Request) -> Response:
        record = _set_route(request, path)
        try:
            view = make_view(request)
            return _json_response(view, status(view))
        except HTTPError:
            raise
        except Exception as error:
            record.reason = _reason(error)
            raise to_http_error(error) from None

    return Route(path, respond, methods=["GET"])


def _view_routes(service: Service, has_keys: bool) -> list[Route]:
    """Return the GET routes with facts about the server and its models."""
    document = orjson.dumps(openapi.document(__version__, has_keys))

    def health_status(view: View | None = None) -> int:
        return 200 if service.status == "ok" else 503

    def readiness(request: Request) -> View:
        return {"ready": service.status == "ok"}

    async def metrics(request: Request) -> Response:
        _set_route(request, "/metrics")
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    def models(request: Request) -> View:
        facts = {"object": "model", "created": 0, "owned_by": "heedful"}
        return {"object": "list", "data": [{"id": name} | facts for name in service.model_queues]}

    return [
        _get("/v1/models", models),
        _get("/info", lambda request: info(service, request.query_params.get("model"))),
        _get("/health", lambda request: {"status": service.status}, health_status),
        *(_get(path, lambda request: {"live": True}) for path in ("/live", "/v2/health/live")),
        *(_get(path, readiness, health_status) for path in ("/ready", "/v2/health/ready")),
        _static("/openapi.json", document, "application/json"),
        Route("/metrics", metrics, methods=["GET"]),
    ]


def info(service: Service, name: str | None) -> View:
    """Return the facts about a model, its routes and the limits, without paths of this machine.

    Args:
        service: The models.
        name: Name of the model. If None, the first model of the server.
    """
    name, model_queue = service.select_model(name, None)
    engine = model_queue.engine
    assert engine is not None, "select_model refuses models that are loading"
    limits = service.settings.limits
    bundle = engine.loaded
    dtype = str(next(bundle.parameters()).dtype).removeprefix("torch.")
    labels = _labels(engine)
    return {
        "model_id": name,
        "model_dtype": engine.plan.precision if engine.plan else dtype,
        "model_type": _model_type(engine, labels),
        "family": bundle.config.family,
        "parameters": engine.parameters,
        "routes": [
            endpoint.path
            for endpoint in endpoints()
            if endpoint.kinds is None or set(head_kinds(model_queue)) & {*endpoint.kinds}
        ],
        "labels": labels,
        "index": _index_facts(engine),
        "max_input_length": engine.limit,
        "max_batch_tokens": limits.max_batch_tokens or engine.token_budget,
        "max_concurrent_requests": limits.max_concurrent_requests,
        "max_client_batch_size": limits.max_client_batch_size,
        "max_connections": limits.max_connections,
        "max_connections_per_address": service.settings.connections_per_address,
        "auto_truncate": engine.kind == "embedding",
        "models": list(service.model_queues),
        "version": __version__,
    }


def _model_type(engine: BundleEngine, labels: list[str] | None) -> View:
    """Return the kind of a model with its details, as in Text Embeddings Inference."""
    head = engine.loaded.config.head
    if engine.kind == "embedding":
        return {"embedding": {"pooling": getattr(head, "pooling", None)}}
    if not isinstance(head, Classes):
        return {engine.kind: {}}
    labels = labels or []
    return {
        "classifier": {
            "id2label": {str(id): label for id, label in enumerate(labels)},
            "label2id": {label: id for id, label in enumerate(labels)},
            "problem_type": head.problem_type,
        }
    }


def _index_facts(engine: BundleEngine) -> View | None:
    """Return the size of the engine's index, or None if it has no index."""
    index: Any = engine.search_index
    return None if index is None else {"documents": len(index), "passages": index.passages}


def _labels(engine: BundleEngine | None) -> list[str] | None:
    """Return the labels of a model's head, or None if it has no labels or is loading."""
    from heedful.tasks.label_answers import unique_label_names

    labels = None if engine is None else getattr(engine.loaded.config.head, "labels", None)
    return None if labels is None else unique_label_names(labels)


def _page_routes(service: Service) -> list[Route]:
    """Return the routes of the web pages' files. If the first model is a search index, "/" is the search page."""
    first_folder = next(iter(service.runs.values()), "")
    files = FILES | ({"/": FILES["/web/search.html"]} if is_index(first_folder) else {})
    return [_static(path, file.read_bytes(), media_type) for path, (file, media_type) in files.items()]


def _static(path: str, content: bytes, media_type: str) -> Route:
    """Return a route that responds to GET with fixed content."""

    async def respond(request: Request) -> Response:
        _set_route(request, path)
        return Response(content, media_type=media_type)

    return Route(path, respond, methods=["GET"])
