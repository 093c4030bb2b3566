"""What becomes of every request field that is known, and docs/reference/fields.md, which tells it.

``python -m chairlift.api.server.field_table > docs/reference/fields.md`` writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from pydantic import WithJsonSchema

from chairlift.api.anthropic.request import MessagesRequest
from chairlift.api.responses.request import ResponsesRequest
from chairlift.api.schemas.field_types import IGNORED, NOT_SUPPORTED
from chairlift.api.schemas.harmless_fields import HARMLESS
from chairlift.api.schemas.known_fields import KNOWN, Api
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from chairlift.api.schemas.unsupported import INSTEAD, neutral

OURS = "Chairlift"

ENDPOINTS: Mapping[Api, tuple[str, type[Request]]] = {
    "chat": ("/v1/chat/completions", ChatRequest),
    "completions": ("/v1/completions", CompletionRequest),
    "responses": ("/v1/responses", ResponsesRequest),
    "messages": ("/v1/messages", MessagesRequest),
    "embeddings": ("/v1/embeddings", EmbeddingRequest),
}

# Notes on fields that behave unexpectedly.
_NOTES: Mapping[str, str] = {
    "ebnf": "a grammar: Lark, or GBNF if it has rules with `::=`",
    "grammar": "a grammar: GBNF if it has rules with `::=`, else Lark",
    "guided_grammar": "a grammar: Lark, or GBNF if it has rules with `::=`",
    "json_schema": "a JSON schema, as an object or its text",
    "metadata": "kept, and told with the response",
    "regex": "as `guided_regex`",
    "response_format": "also with llama.cpp's `schema`",
    "user": "kept, and told with the response",
}
_HEAD = """\
# Fields of requests

Every field that OpenAI, Anthropic, vLLM, SGLang, llama.cpp, mlx-lm and Ollama know, and what
becomes of it here. `python -m chairlift.api.server.field_table` writes this page from the code's
own tables, and a test sends each field and looks at what comes out.

- **done**: it has the effect that it has there.
- **ignored**: it changes nothing in what comes out here, for the reason given.
- **refused**: status 400 that names it, except with values that ask for nothing: null, and those
  given.

A field of one API is refused by name at the others that do not have it. Fields that nobody lists
are ignored, and the log names them in one line. At `/tokenize`, `/detokenize`,
`/v1/messages/count_tokens` and `/v1/embeddings` nothing is generated: there fields that change
nothing but a reply are ignored, whoever knows them.
"""


class Outcome(NamedTuple):
    """What becomes of a field; ``note`` says more, in Markdown."""

    kind: Literal["done", "ignored", "refused"]
    note: str = ""


def declared(kind: type[Request]) -> frozenset[str]:
    """The names of a request's fields, as they are on the wire."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def fields_of(api: Api) -> Mapping[str, tuple[str, ...]]:
    """Who knows each field of an API, by its name."""
    known = KNOWN[api]
    names = declared(ENDPOINTS[api][1]).union(*known.values())
    return {
        name: tuple(who for who, theirs in known.items() if name in theirs) or (OURS,)
        for name in sorted(names)
    }


def outcome(api: Api, name: str) -> Outcome:
    """What becomes of a field of an API."""
    own = declared(ENDPOINTS[api][1])
    if name in own:
        return _declared_outcome(ENDPOINTS[api][1], name)
    if name in HARMLESS:
        return Outcome("ignored", HARMLESS[name])
    # 1 and 1.0 are shown once.
    values = [json.dumps(v) for v in neutral(name) if not (isinstance(v, float) and v.is_integer())]
    notes = [f"except {', '.join(f'`{value}`' for value in values)}"] if values else []
    if (instead := INSTEAD.get(name)) in own:
        notes.append(f"use `{instead}`")
    return Outcome("refused", "; ".join(notes))


def _declared_outcome(kind: type[Request], name: str) -> Outcome:
    """What becomes of a declared field; ``field_types`` marks those without effect."""
    field = next(field for own, field in kind.model_fields.items() if name in (own, field.alias))
    for mark in field.metadata:
        if isinstance(mark, WithJsonSchema) and mark.json_schema is not None:
            description = mark.json_schema.get("description")
            if description == IGNORED:
                return Outcome("ignored", "it changes nothing here")
            if description == NOT_SUPPORTED:
                values = [json.dumps(v) for v in mark.json_schema.get("enum", ()) if v is not None]
                note = f"except {', '.join(f'`{value}`' for value in values)}" if values else ""
                return Outcome("refused", note)
    return Outcome("done", _NOTES.get(name, ""))


def page() -> str:
    """All of docs/reference/fields.md."""
    return "\n".join([_HEAD, *(line for api in ENDPOINTS for line in _section(api))])


def _section(api: Api) -> Iterator[str]:
    yield f"## {ENDPOINTS[api][0]}\n"
    yield "| field | known by | here |"
    yield "|---|---|---|"
    for name, servers in fields_of(api).items():
        kind, note = outcome(api, name)
        yield f"| `{name}` | {', '.join(servers)} | {kind}{': ' if note else ''}{note} |"
    yield ""


if __name__ == "__main__":
    print(page(), end="")
