"""/openapi.json, made of the types by which requests are read."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from heedful.serve import requests, responses
from heedful.serve.routes import endpoints

TOLD = {
    400: "the head of the request is not understood",
    401: "a key is missing or wrong",
    403: "not from here: host or origin",
    404: "no such path or model",
    405: "another method",
    408: "the body did not come in time",
    413: "more than a request may have",
    415: "not JSON in UTF-8",
    422: "the body is not what this route reads",
    429: "too much waits already",
    431: "the headers are too large",
    500: "the model failed on this input",
    503: "loading, stopping, or too many connections or large bodies",
    504: "the deadline passed",
}
Schema: TypeAlias = dict[str, Any]  # JSON Schema, and JSON around it
OPENAI = "/v1/"
ALWAYS = (400, 401, 403, 404, 405, 431, 500, 503)
WITH_BODY = (408, 413, 415, 422, 429, 504)
VIEWS: tuple[tuple[str, type[Struct], str], ...] = (  # of GET: path, what it answers, in a sentence
    ("/info", responses.Info, "A model, and what it may be asked."),
    ("/health", responses.Health, "Whether all models answer."),
    ("/live", responses.Live, "Whether the server runs."),
    ("/ready", responses.Ready, "Whether all models answer."),
    ("/v1/models", responses.ModelList, "The models, in OpenAI's form."),
    ("/v2", responses.ServerFacts, "The server."),
    ("/v2/health/live", responses.Live, "Whether the server runs."),
    ("/v2/health/ready", responses.Ready, "Whether all models answer."),
    ("/v2/models/{name}", responses.ModelFacts, "A model's tensors."),
    ("/v2/models/{name}/ready", responses.Ready, "Whether the model answers."),
)


def document(version: str, keys: bool) -> Schema:
    """OpenAPI 3.1."""
    asked = [
        (endpoint.path, endpoint.body, endpoint.answer, endpoint.summary, endpoint.example) for endpoint in endpoints()
    ]
    asked.append(
        ("/v2/models/{name}/infer", requests.InferBody, responses.InferResponse, "The Open Inference Protocol.", {})
    )
    types = [kind for _, body, answer, _, _ in asked for kind in (body, answer)]
    types += [answer for _, answer, _ in VIEWS] + [responses.ErrorResponse, responses.OpenAIErrorResponse]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema = iter(schemas)
    paths: Schema = {}
    for path, _, _, summary, example in asked:
        body, answer = next(schema), next(schema)
        content = {"schema": body} | ({"example": example} if example else {})
        paths[path] = {
            "post": _operation(path, summary, answer, (*ALWAYS, *WITH_BODY))
            | {"requestBody": {"required": True, "content": {"application/json": content}}}
        }
    for path, _, summary in VIEWS:
        more = (422,) if path == "/info" else ()
        paths[path] = {"get": _operation(path, summary, next(schema), (*ALWAYS, *more))}
    text = {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    paths["/metrics"] = {"get": _operation("/metrics", "Counts and histograms.", {}, ALWAYS)}
    paths["/metrics"]["get"]["responses"]["200"] = text
    contents: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "Heedful", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        contents["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        contents["security"] = [{"key": []}]
    return contents


def _operation(path: str, summary: str, answer: Schema, statuses: tuple[int, ...]) -> Schema:
    error = "OpenAIErrorResponse" if path.startswith(OPENAI) else "ErrorResponse"
    refused = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
    responses: Schema = {"200": {"description": "the answer", "content": {"application/json": {"schema": answer}}}}
    for status in sorted(statuses):
        responses[str(status)] = {"description": TOLD[status], "content": refused}
    if path.endswith("ready") or path == "/health":
        responses["503"]["content"] = responses["200"]["content"]
    operation: Schema = {"summary": summary, "responses": responses}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    if path == "/info":
        operation["parameters"] = [{"name": "model", "in": "query", "schema": {"type": "string"}}]
    return operation
