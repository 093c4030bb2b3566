"""Generates valid HTTP requests with very expensive bodies, for every endpoint, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_USER = b'[{"role":"user","content":"hi"}]'
# The required fields of each endpoint, besides the attacked one.
ENDPOINTS: Mapping[str, Mapping[str, bytes]] = {
    "/v1/chat/completions": {"messages": _USER, "max_tokens": b"8"},
    "/v1/completions": {"prompt": b'"hi"', "max_tokens": b"8"},
    "/v1/responses": {"input": b'"hi"', "max_output_tokens": b"8"},
    "/v1/messages": {"messages": _USER, "max_tokens": b"8"},
    "/v1/messages/count_tokens": {"messages": _USER},
    "/v1/embeddings": {"input": b'"hi"'},
    "/api/chat": {"messages": _USER, "options": b'{"num_predict":8}', "stream": b"false"},
    "/api/generate": {"prompt": b'"hi"', "options": b'{"num_predict":8}', "stream": b"false"},
    "/api/embed": {"input": b'"hi"'},
    "/tokenize": {"prompt": b'"hi"'},
    "/detokenize": {"tokens": b"[1]"},
}
_GENERATES = ("/v1/chat/completions", "/v1/completions")
_CHATS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")


@dataclass(frozen=True, slots=True)
class Hostile:
    """A request; ``kind`` names what makes it expensive."""

    kind: str
    path: str
    body: bytes


def repeated(item: str, size: int, start: str = "[", end: str = "]") -> bytes:
    """Repeats an item between ``start`` and ``end``, as often as fits ``size`` bytes."""
    raw = item.encode()
    count = max(1, (size - len(start) - len(end)) // (len(raw) + 1))
    return start.encode() + (raw + b",") * (count - 1) + raw + end.encode()


# Values for any field, as functions of a size in bytes.
_ANYWHERE: Mapping[str, Callable[[int], bytes]] = {
    "empty lists": lambda size: repeated("[]", size),
    "empty objects": lambda size: repeated("{}", size),
    "nulls": lambda size: repeated("null", size),
    "numbers": lambda size: repeated("1", size),
    "empty strings": lambda size: repeated('""', size),
    "parts of an unknown type": lambda size: repeated('{"type":"x"}', size),
    "parts without a text": lambda size: repeated('{"type":"text"}', size),
    "parts of a wrong text": lambda size: repeated('{"type":"input_text","text":[1]}', size),
    "messages of a wrong role": lambda size: repeated('{"role":"x","content":[{}]}', size),
    "many fields": lambda size: _many_fields(size),
    "deep lists": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "deep objects": lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "a long string": lambda size: b'"' + b"a" * size + b'"',
    "a string of four-byte characters": lambda size: b'"' + "🙂".encode() * (size // 4) + b'"',
    "a long number": lambda size: b"9" * size,
}


def _many_fields(size: int) -> bytes:
    return b"{" + b",".join(b'"%x":1' % number for number in range(size // 10)) + b"}"


_PARTS: Mapping[str, str] = {
    "/v1/chat/completions": '{"type":"text","text":"a"}',
    "/tokenize": '{"type":"text","text":"a"}',
    "/v1/responses": '{"type":"input_text","text":"a"}',
    "/v1/messages": '{"type":"text","text":"a"}',
}
# Grammars in Lark and GBNF for which the compiler, the converter or each mask takes too long.
GRAMMARS: Mapping[str, Callable[[int], str]] = {
    "blank lines": lambda size: 'root ::= "a"\n' + "\n" * size,
    "comments": lambda size: 'root ::= "a"\n' + "# a\n" * (size // 4),
    "open brackets": lambda size: "root ::= " + "(" * size,
    "a chain of rules": lambda size: _chain(size // 24),
    "rules that name each other": lambda size: _mesh(size // 24),
    "alternatives": lambda size: "start: " + " | ".join(["/a+b/"] * (size // 8)),
    "ambiguous": lambda size: 'start: a\na: a a a | a a | "x" | ',
    "ambiguous later": lambda size: "start: /[a-z]{24}/ a\na: a a a | a a | /[a-z]/ | ",
    "repetitions": lambda size: "start: /((a{1,99}){1,99}){1,99}/",
    "no grammar": lambda size: "\\" * size,
}
REGEXES: Mapping[str, Callable[[int], str]] = {
    "alternatives": lambda size: "|".join(["a+b"] * (size // 4)),
    "nested repetitions": lambda size: "(" * 50 + "a" + "{1,9})" * 50,
    "far look back": lambda size: "(a|b)*a(a|b){200}",
    "classes": lambda size: "[^a]" * (size // 4),
    "complements": lambda size: "(.*a.{20}b.*)&(.*b.{20}a.*)" * (size // 32),
}
SCHEMAS: Mapping[str, Callable[[int], Any]] = {
    "multiple of a prime": lambda size: {"type": "integer", "multipleOf": 999_983},
    "properties": lambda size: {
        "type": "object",
        "properties": {f"p{number}": {"type": "string"} for number in range(size // 28)},
    },
    "alternatives": lambda size: {
        "anyOf": [{"type": "string", "maxLength": n} for n in range(size // 40)]
    },
    "nested": lambda size: _nested(60),
    "long strings": lambda size: {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "an enumeration": lambda size: {"enum": [f"{n:06d}" for n in range(size // 9)]},
    "references": lambda size: _references(size // 60),
}


def _chain(count: int) -> str:
    rules = "\n".join(f"r{number}: r{number + 1}" for number in range(count))
    return f'start: r0\n{rules}\nr{count}: "a"'


def _mesh(count: int) -> str:
    rules = "\n".join(f'r{n}: "a" | r{(n + 1) % count} r{n // 2}' for n in range(count))
    return f"start: r0\n{rules}"


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}}
    return schema


def _references(count: int) -> dict[str, Any]:
    names = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**names, f"d{count}": {"type": "null"}}}


def hostile_bodies(
    fields: Mapping[str, Sequence[str]], seed: int, sizes: Sequence[int], grammar_size: int
) -> Iterator[Hostile]:
    """Yields each attack on each endpoint once at the largest size, then random ones endlessly.

    Args:
        fields: the names of each endpoint's fields, from /openapi.json.
        seed: the seed of the random numbers.
        sizes: sizes of bodies in bytes; the last one is the server's limit.
        grammar_size: characters of grammars, schemas and regular expressions.
    """
    draw = random.Random(seed)
    named = list(_named(sizes[-1] - 1024, grammar_size))
    draw.shuffle(named)
    yield from (make() for make in named)
    while True:
        path = draw.choice(list(ENDPOINTS))
        kind = draw.choice(list(_ANYWHERE))
        field = draw.choice((*fields[path], "unknown"))
        value = _ANYWHERE[kind](draw.choice(sizes) - 1024)
        yield Hostile(f"{kind} as {field}", path, _body(path, **{field: value}))


def _named(size: int, grammar_size: int) -> Iterator[Callable[[], Hostile]]:
    def attack(kind: str, path: str, **given: Callable[[], bytes]) -> Callable[[], Hostile]:
        # Built just before sending: all bodies together would take gigabytes.
        return lambda: Hostile(kind, path, _body(path, **{k: v() for k, v in given.items()}))

    for path, required in ENDPOINTS.items():
        main = next(iter(required))
        for kind, make in _ANYWHERE.items():
            yield attack(f"{kind} as {main}", path, **{main: lambda make=make: make(size)})
        yield attack("unknown fields", path, unknown=lambda: _many_fields(size))
    for path in _CHATS:
        field = "input" if path == "/v1/responses" else "messages"
        for kind, text in _conversations(_PARTS[path], size).items():
            yield attack(kind, path, **{field: text})
    for path in _GENERATES:
        for name, stops in _stops().items():
            yield attack(f"stops: {name}", path, stop=lambda stops=stops: _json(stops))  # type: ignore[misc]
        yield attack("a bias for each of 100,000 ids", path, logit_bias=lambda: _bias(100_000))
        for kind, grammar in GRAMMARS.items():
            written = grammar(grammar_size)
            yield attack(f"grammar: {kind}", path, guided_grammar=lambda t=written: _json(t))  # type: ignore[misc]
        for kind, regex in REGEXES.items():
            written = regex(grammar_size)
            yield attack(f"regex: {kind}", path, guided_regex=lambda t=written: _json(t))  # type: ignore[misc]
        for kind, schema in SCHEMAS.items():
            form = schema(grammar_size)
            yield attack(f"schema: {kind}", path, guided_json=lambda f=form: _json(f))  # type: ignore[misc]
    chat = "/v1/chat/completions"
    for kind, schema in SCHEMAS.items():
        yield attack(f"tools: {kind}", chat, tools=lambda s=schema: _tools(s(grammar_size // 4)))  # type: ignore[misc]
    yield attack("a template", chat, chat_template=lambda: _json("{{ 1 }}" * 99_999))
    yield attack(
        "template settings", chat, chat_template_kwargs=lambda: repeated('"a":[]', size, "{", "}")
    )


def _conversations(part: str, size: int) -> Mapping[str, Callable[[], bytes]]:
    def message(content: str, role: str = "user") -> str:
        return f'{{"role":"{role}","content":{content}}}'

    def many(item: str) -> Callable[[], bytes]:
        return lambda: repeated(item, size)

    return {
        "many messages": many(message('"a"')),
        "messages to the limit": lambda: repeated(message('"a"'), 4096 * 30),
        "many parts": lambda: repeated(part, size, '[{"role":"user","content":[', "]}]"),
        "messages of parts": many(message(f"[{part},{part}]")),
        "large messages of one role": lambda: repeated(message(json.dumps("b" * 4000)), size),
        "messages of empty calls": many('{"role":"assistant","tool_calls":[{},{},{}]}'),
        "a call of many values": lambda: (
            b'[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[{"id":"a","type":'
            b'"function","function":{"name":"f","arguments":"{\\"a\\":['
            + b"[]," * (size // 3 - 100)
            + b'[]]}"}}]}]'
        ),
    }


def _stops() -> Mapping[str, list[str]]:
    return {
        "one holds, none fits": ["e" * 1023 + "\0", *(f"\0{'e' * (1000 + n)}" for n in range(15))],
        "nearly the same": [" " * (1023 - n) + "\0" for n in range(16)],
        "too many": ["a"] * 100_000,
        "too long": ["a" * 100_000],
    }


def _bias(count: int) -> bytes:
    return _json({str(number): 1 for number in range(count)})


def _tools(parameters: Any) -> bytes:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": parameters}}}
    tools = [
        {"type": "function", "function": {**function, "name": f"f{n}", "strict": True}}
        for n in range(4)
    ]
    return _json(tools)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _body(path: str, **given: bytes) -> bytes:
    members = {**ENDPOINTS[path], **given}
    if path == "/tokenize" and "messages" in given:
        del members["prompt"]
    return b"{" + b",".join(b'"%b":%b' % (k.encode(), v) for k, v in members.items()) + b"}"
