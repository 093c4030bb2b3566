"""Builds the document of GET /openapi.json from the routes and their request and reply types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from chairlift.api.admission.priority import HEADER
from chairlift.api.http.version import VERSION
from chairlift.api.server.route import Route
from chairlift.api.server.routes import ROUTES
from chairlift.engine.messages import MAX_PRIORITY

_COMPONENTS = "#/components/schemas/"
_PATH_NAME = re.compile(r"{(\w+)}")
_PRIORITY = {
    "name": HEADER,
    "in": "header",
    "description": "The priority class if the body has no priority; lower runs earlier.",
    "schema": {"type": "integer", "minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY, "default": 0},
}


@cache
def document_bytes() -> bytes:
    """The description as JSON. Building it takes a fifth of a second."""
    return msgspec.json.encode(document())


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 description of every route in ROUTES."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Chairlift", "version": VERSION},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


def _schemas() -> dict[str, Any]:
    requests = {route.request for route in ROUTES if route.request is not None}
    _, definitions = models_json_schema(
        [(request, "validation") for request in sorted(requests, key=lambda kind: kind.__name__)],
        ref_template=_COMPONENTS + "{model}",
    )
    replies: set[type[msgspec.Struct]] = set()
    for route in ROUTES:
        replies.update({route.error_format.schema}, route.chunks)
        replies.update(kind for kind in (route.reply, route.anthropic_reply) if kind is not None)
    _, components = msgspec.json.schema_components(
        sorted(replies, key=lambda kind: kind.__name__), ref_template=_COMPONENTS + "{name}"
    )
    assert not definitions["$defs"].keys() & components.keys()
    return {**definitions["$defs"], **components}


def _operation(route: Route) -> dict[str, Any]:
    content = _reply_content(route)
    if route.chunks:
        content[route.framing.content_type.partition(";")[0]] = _schema_of(*route.chunks)
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.handler.__name__}_{route.method.lower()}"
        if route.path == "/ping"
        else route.handler.__name__,
        "responses": {
            "200": {"description": "Success", "content": content},
            "default": {
                "description": "Error",
                "content": {"application/json": _schema_of(route.error_format.schema)},
            },
        },
    }
    if route.request is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": _schema_of(route.request)},
        }
    if route.form:
        form = {"type": "object", "properties": dict(route.form)}
        operation["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": form}},
        }
    if parameters := list(_parameters(route)):
        operation["parameters"] = parameters
    return operation


def _reply_content(route: Route) -> dict[str, Any]:
    if route.reply is None:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    reply = _schema_of(*filter(None, (route.reply, route.anthropic_reply)))
    if route.is_list:
        reply = {"schema": {"type": "array", "items": reply["schema"]}}
    return {"application/json": reply}


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name in _PATH_NAME.findall(route.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, schema in route.query.items():
        yield {"name": name, "in": "query", "schema": schema}
    if route.request is not None and "priority" in route.request.model_fields:
        yield _PRIORITY


def _schema_of(*kinds: type) -> dict[str, Any]:
    references = [{"$ref": _COMPONENTS + kind.__name__} for kind in kinds]
    return {"schema": references[0] if len(references) == 1 else {"oneOf": references}}
