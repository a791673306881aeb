"""`document`: the OpenAPI document of /openapi.json, generated from the types of request and response bodies."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from heedful.serve import requests, responses
from heedful.serve.routes import endpoints

STATUS_DESCRIPTIONS = {
    400: "the head of the request is invalid",
    401: "the API key is missing or wrong",
    403: "the host or the origin is not allowed",
    404: "the path or the model is unknown",
    405: "the path does not have this method",
    408: "the body was not received in time",
    413: "the request is larger than a limit",
    415: "the body is not JSON in UTF-8",
    422: "the body is not what this route reads",
    429: "too many requests wait already",
    431: "the headers are too large",
    500: "the model failed on this input",
    503: "the server is loading or stopping, or has too many connections or large bodies",
    504: "the deadline passed",
}
Schema: TypeAlias = dict[str, Any]  # a JSON Schema, or a part of the document with schemas in it
OPENAI_PREFIX = "/v1/"  # paths whose errors are in OpenAI's form
COMMON_ERRORS = (400, 401, 403, 404, 405, 431, 500, 503)  # error statuses of all routes
BODY_ERRORS = (408, 413, 415, 422, 429, 504)  # further error statuses of routes with a request body
VIEWS: tuple[tuple[str, type[Struct], str], ...] = (  # GET routes: path, type of the response, summary
    ("/info", responses.Info, "Return the facts about a model, its routes and the limits."),
    ("/health", responses.Health, "Return the status of the server."),
    ("/live", responses.Live, "Return whether the server runs."),
    ("/ready", responses.Ready, "Return whether all models are loaded."),
    ("/v1/models", responses.ModelList, "Return the models, in OpenAI's form."),
    ("/v2", responses.ServerFacts, "Return name and version of the server."),
    ("/v2/health/live", responses.Live, "Return whether the server runs."),
    ("/v2/health/ready", responses.Ready, "Return whether all models are loaded."),
    ("/v2/models/{name}", responses.ModelFacts, "Return the input and output tensors of a model."),
    ("/v2/models/{name}/ready", responses.Ready, "Return whether a model is loaded."),
)


def document(version: str, has_keys: bool) -> Schema:
    """Return the description of all routes, in OpenAPI 3.1.

    Args:
        version: Version of the package.
        has_keys: Whether the server requires an API key.
    """
    posts = [
        (endpoint.path, endpoint.body, endpoint.answer, endpoint.summary, endpoint.example) for endpoint in endpoints()
    ]
    posts.append(
        (
            "/v2/models/{name}/infer",
            requests.InferBody,
            responses.InferResponse,
            "Return the outputs of a model for tensors of texts.",
            {},
        )
    )
    types = [kind for _, body, answer, _, _ in posts for kind in (body, answer)]
    types += [answer for _, answer, _ in VIEWS] + [responses.ErrorResponse, responses.OpenAIErrorResponse]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema = iter(schemas)  # in the order of `types`
    paths: Schema = {}
    for path, _, _, summary, example in posts:
        body, answer = next(schema), next(schema)
        operation = _operation(path, summary, answer, (*COMMON_ERRORS, *BODY_ERRORS))
        content = {"schema": body} | ({"example": example} if example else {})
        operation["requestBody"] = {"required": True, "content": {"application/json": content}}
        paths[path] = {"post": operation}
    for path, _, summary in VIEWS:
        more_errors = (422,) if path == "/info" else ()
        paths[path] = {"get": _operation(path, summary, next(schema), (*COMMON_ERRORS, *more_errors))}
    text = {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    paths["/metrics"] = {"get": _operation("/metrics", "Return the metrics of the server.", {}, COMMON_ERRORS)}
    paths["/metrics"]["get"]["responses"]["200"] = text
    contents: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Heedful", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        contents["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        contents["security"] = [{"key": []}]
    return contents


def _operation(path: str, summary: str, answer: Schema, statuses: tuple[int, ...]) -> Schema:
    """Return the description of a method of a path.

    Args:
        path: The path.
        summary: A sentence that describes the method.
        answer: Schema of the response with status 200.
        statuses: HTTP statuses of errors.
    """
    error_type = "OpenAIErrorResponse" if path.startswith(OPENAI_PREFIX) else "ErrorResponse"
    error_content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error_type}"}}}
    responses: Schema = {"200": {"description": "the answer", "content": {"application/json": {"schema": answer}}}}
    for status in sorted(statuses):
        responses[str(status)] = {"description": STATUS_DESCRIPTIONS[status], "content": error_content}
    if path.endswith("ready") or path == "/health":
        responses["503"]["content"] = responses["200"]["content"]
    operation: Schema = {"summary": summary, "responses": responses}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path == "/info":
        operation["parameters"] = [{"name": "model", "in": "query", "schema": {"type": "string"}}]
    return operation
