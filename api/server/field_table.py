"""Writes docs/reference/fields.md: all known request fields, and whether they have an effect here.

``python -m chairlift.api.server.field_table > docs/reference/fields.md``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from pydantic import WithJsonSchema

from chairlift.api.anthropic.request import MessagesRequest
from chairlift.api.llamacpp.request import InfillRequest
from chairlift.api.ollama.options import OllamaOptions
from chairlift.api.ollama.request import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from chairlift.api.responses.request import ResponsesRequest
from chairlift.api.schemas.field_types import IGNORED, NOT_SUPPORTED
from chairlift.api.schemas.harmless_fields import HARMLESS
from chairlift.api.schemas.known_fields import KNOWN, Api
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.sampling_defaults import MODEL_DEFAULT
from chairlift.api.schemas.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from chairlift.api.schemas.unsupported import INSTEAD, neutral

THIS_SERVER = "Chairlift"

ENDPOINTS: Mapping[Api, tuple[str, type[Request]]] = {
    "chat": ("/v1/chat/completions", ChatRequest),
    "completions": ("/v1/completions", CompletionRequest),
    "responses": ("/v1/responses", ResponsesRequest),
    "messages": ("/v1/messages", MessagesRequest),
    "embeddings": ("/v1/embeddings", EmbeddingRequest),
    "infill": ("/infill", InfillRequest),
    "ollama_chat": ("/api/chat", OllamaChatRequest),
    "ollama_generate": ("/api/generate", OllamaGenerateRequest),
    "ollama_embed": ("/api/embed", OllamaEmbedRequest),
}

# Notes on fields that behave unexpectedly.
_NOTES: Mapping[str, str] = {
    "ebnf": "a grammar: Lark, or GBNF if it has rules with `::=`",
    "grammar": "a grammar: GBNF if it has rules with `::=`, else Lark",
    "guided_grammar": "a grammar: Lark, or GBNF if it has rules with `::=`",
    "json_schema": "a JSON schema, as an object or its text",
    "metadata": "stored and returned with the response",
    "prediction": "proposed to the model; `usage` tells how much of it was right",
    "regex": "as `guided_regex`",
    "response_format": "also with llama.cpp's `schema`",
    "user": "stored and returned with the response",
}
# Why declared fields that could matter have no effect.
_IGNORED: Mapping[str, str] = {
    "n_indent": "editors send it; no indentation is enforced",
    "response_fields": "the reply has all fields",
    "samplers": "editors send it; the order of samplers is fixed",
    "t_max_predict_ms": "editors send it; `timeout` limits a request",
    "t_max_prompt_ms": "editors send it; `timeout` limits a request",
    "num_ctx": "the server's flags decide how long the context is",
    "num_keep": "no part of a context is ever dropped",
    "repeat_last_n": "penalties count all tokens of prompt and reply",
    **dict.fromkeys(("mirostat_eta", "mirostat_tau"), "only has an effect with `mirostat`"),
}
# Declared fields of which only one value is accepted, which depends on another field.
_REFUSED: Mapping[str, str] = {"best_of": "except the value of `n`"}
_HEAD = """\
# Fields of requests

This page lists every field that OpenAI, Anthropic, vLLM, SGLang, llama.cpp, mlx-lm and Ollama
accept, and how Chairlift handles it. `python -m chairlift.api.server.field_table` writes it from
the server's own tables, and a test sends each field and checks the reply.

- **done**: the field has the same effect here.
- **ignored**: the field cannot change the reply, for the reason given.
- **refused**: the reply is status 400 and names the field, unless the value is neutral: null, or
  one of the values given.

A field of one API is refused at the other APIs that do not have it. Fields in no list are ignored,
and one line of the log names them. `/tokenize`, `/detokenize`, `/v1/messages/count_tokens`,
`/v1/embeddings` and `/api/embed` generate nothing, so they ignore all fields that affect generation
only.
"""


class Outcome(NamedTuple):
    """The handling of a field, with details in Markdown."""

    kind: Literal["done", "ignored", "refused"]
    note: str = ""


def declared(kind: type[Request]) -> frozenset[str]:
    """The names of the fields that a request model declares, as they are in JSON."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def fields_of(api: Api) -> Mapping[str, tuple[str, ...]]:
    """Maps the name of each field of an API to the servers that know it."""
    known = KNOWN[api]
    names = declared(ENDPOINTS[api][1]).union(*known.values())
    return {
        name: tuple(server for server, fields in known.items() if name in fields) or (THIS_SERVER,)
        for name in sorted(names)
    }


def outcome(api: Api, name: str) -> Outcome:
    """The handling of a field of an API."""
    declared_names = declared(ENDPOINTS[api][1])
    if name in declared_names:
        return _declared_outcome(ENDPOINTS[api][1], name)
    if name in HARMLESS:
        return Outcome("ignored", HARMLESS[name])
    # 1 and 1.0 are shown once.
    values = [json.dumps(v) for v in neutral(name) if not (isinstance(v, float) and v.is_integer())]
    notes = [f"except {', '.join(f'`{value}`' for value in values)}"] if values else []
    if (instead := INSTEAD.get(name)) in declared_names:
        notes.append(f"use `{instead}`")
    return Outcome("refused", "; ".join(notes))


def _declared_outcome(kind: type[Request], name: str) -> Outcome:
    """The handling of a declared field; the types in ``field_types`` mark those without effect."""
    if name in _REFUSED:
        return Outcome("refused", _REFUSED[name])
    field = next(field for key, field in kind.model_fields.items() if name in (key, field.alias))
    for mark in field.metadata:
        if isinstance(mark, WithJsonSchema) and mark.json_schema is not None:
            description = mark.json_schema.get("description")
            if description == IGNORED:
                return Outcome("ignored", _IGNORED.get(name, "it cannot change the reply"))
            if description == NOT_SUPPORTED:
                values = [json.dumps(v) for v in mark.json_schema.get("enum", ()) if v is not None]
                note = f"except {', '.join(f'`{value}`' for value in values)}" if values else ""
                return Outcome("refused", note)
    if field.description == MODEL_DEFAULT:
        return Outcome("done", "the default is the model's")
    return Outcome("done", _NOTES.get(name, ""))


def page() -> str:
    """The whole page, in Markdown."""
    sections = [line for api in ENDPOINTS for line in _section(api)]
    return "\n".join([_HEAD, *sections, *_options_section()])


def _section(api: Api) -> Iterator[str]:
    yield f"## {ENDPOINTS[api][0]}\n"
    yield "| field | known by | here |"
    yield "|---|---|---|"
    for name, servers in fields_of(api).items():
        kind, note = outcome(api, name)
        yield f"| `{name}` | {', '.join(servers)} | {kind}{': ' if note else ''}{note} |"
    yield ""


def _options_section() -> Iterator[str]:
    yield "## `options` of /api/chat and /api/generate\n"
    yield "| option | here |"
    yield "|---|---|"
    for name in sorted(OllamaOptions.model_fields):
        kind, note = _declared_outcome(OllamaOptions, name)
        yield f"| `{name}` | {kind}{': ' if note else ''}{note} |"
    yield ""


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(page(), end="")
