"""Writes docs/reference/api.md from the routes and their request models.

``python -m chairlift.api.server.reference > docs/reference/api.md``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from chairlift.api.admission.priority import HEADER
from chairlift.api.openai.completions import DEFAULT_MAX_TOKENS
from chairlift.api.schemas.sampling_defaults import MODEL_DEFAULT
from chairlift.api.server.route import Route
from chairlift.api.server.routes import ROUTES

_HEAD = f"""\
# API endpoints

Generated from the server's routes and request models by `python -m
chairlift.api.server.reference`; a test compares this page with the code. A running server has
the same as an OpenAPI 3.1 document at `/openapi.json`.

The server also has `GET /metrics` ([metrics](metrics.md)), `GET /openapi.json`, and the built-in
page at `/`. `HEAD` works wherever `GET` does. Paths below `/v1` also work without `/v1`. The
header `{HEADER}` sets a request's priority if its body does not. Where the default is the model's,
it is in `default_sampling_params` of `GET /v1/models`
([default sampling](../guides/chat.md#default-sampling)). Without a limit of its tokens, a reply may
fill the context; only on `/v1/completions` it has at most {DEFAULT_MAX_TOKENS} tokens, as OpenAI's.

[Request fields](fields.md) also lists the fields of other servers, and whether Chairlift applies,
ignores or refuses each. The [guides](../guides/apis.md) have examples.
"""


def page() -> str:
    """The whole page, in Markdown."""
    lines = [_HEAD, "| method | path | what it does | streams |", "|---|---|---|---|"]
    for route in ROUTES:
        streams = "yes" if route.chunks else ""
        lines.append(f"| {route.method} | `{route.path}` | {route.summary} | {streams} |")
    lines.append("")
    for route in ROUTES:
        if route.request is not None:
            lines.extend(_fields(route))
    return "\n".join(lines)


def _fields(route: Route) -> Iterator[str]:
    assert route.request is not None
    schema = route.request.model_json_schema(mode="validation")
    required = schema.get("required", ())
    yield f"## {route.method} {route.path}\n"
    yield "| field | type | default |"
    yield "|---|---|---|"
    for name, field in sorted(schema["properties"].items()):
        default = "required" if name in required else _default(field)
        yield f"| `{name}` | {_type(field, schema.get('$defs', {}))} | {default} |"
    yield ""


def _default(field: Mapping[str, Any]) -> str:
    if field.get("description") == MODEL_DEFAULT:
        return "the model's"
    value = field.get("default")
    return "none" if value is None else f"`{json.dumps(value)}`"


def _type(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """The JSON type and its range, like ``integer (0 to 20)``; alternatives are joined by "or"."""
    if "$ref" in field:
        return _type(definitions[field["$ref"].rpartition("/")[2]], definitions)
    if "enum" in field or "const" in field:
        values = field.get("enum", [field.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    parts = field.get("anyOf") or field.get("oneOf")
    if parts:
        kinds = [_type(part, definitions) for part in parts if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"array of {_type(field.get('items', {}), definitions)}"
    bounds = _range(field)
    return f"{kind} ({bounds})" if bounds else kind


def _range(field: Mapping[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    lower = f"{low}" if low is not None else f"above {above}" if above is not None else ""
    if below is not None and field.get("type") == "integer":
        high = below - 1
    upper = f"to {high}" if high is not None else f"below {below}" if below is not None else ""
    if not upper and lower and above is None:
        return f"at least {lower}"
    return f"{lower} {upper}".strip()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(page(), end="")
