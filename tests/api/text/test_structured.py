"""Structured output in the API: accepted and refused requests, and their cost."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from support.api.api_server import CHAT, Running, chosen, ids, running, tool
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info
from tokenizers import Tokenizer, decoders, models, normalizers

from chairlift.engine.errors import GrammarError, QueueFull
from chairlift.engine.grammar.checker import Checker
from chairlift.engine.grammar.language import MAX_CHARS, Lexicon, compiled, lexicon
from chairlift.engine.messages import Grammar
from chairlift.engine.workers.pool import MAX_WAITING_OF_ONE, PROCESSES, Workers

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
STRICT = json.dumps({**SCHEMA, "additionalProperties": False}, separators=(",", ":"))
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
LOOSE = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
LARK = '?start: word\nword: "a" // ::= is not how a rule begins\n'
GBNF = 'root ::= "a" [0-9]+'
# Grammars known to compile forever or to overflow the stack.
ENDLESS = {"type": "integer", "multipleOf": 999_983}
RULES = "\n".join(f'r{i}: "a" | r{(i + 1) % 4000}' for i in range(4000))
DEEP = "start: " + " ".join(f"r{i}" for i in range(4000)) + "\n" + RULES


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers(["chairlift.engine.grammar.trial"])
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def checker(workers: Workers) -> Checker:
    return Checker(lambda: lexicon(byte_tokenizer(), 258), workers)


@pytest.fixture
async def server(checker: Checker) -> AsyncIterator[Running]:
    engine = FakeEngine(model_info(), lambda request, index: Scripted(ids("text")))
    async with running(engine) as server:
        vocabulary = server.service.loaded.vocabulary  # type: ignore[union-attr]
        vocabulary.grammars = checker
        yield server


ASKED: list[tuple[dict[str, Any], Grammar]] = [
    ({"response_format": NAMED}, Grammar("json_schema", STRICT)),
    ({"response_format": LOOSE}, Grammar("json_schema", TEXT)),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"json": TEXT}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a","b"]')),
    ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar("json_object")),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, Grammar("json_schema", TEXT)),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    # llama.cpp's and SGLang's.
    ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT)),
    ({"json_schema": json.dumps(SCHEMA, indent=1)}, Grammar("json_schema", TEXT)),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        Grammar("json_schema", TEXT),
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        Grammar("json_schema", TEXT),
    ),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": LARK}, Grammar("lark", LARK)),
    ({"grammar": LARK}, Grammar("lark", LARK)),
    ({"guided_grammar": LARK}, Grammar("lark", LARK)),
    # The same by several names is one.
    ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, Grammar("regex", "a")),
    ({"guided_json": TEXT, "structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]')),
    ({"guided_grammar": LARK, "structured_outputs": {"grammar": LARK}}, Grammar("lark", LARK)),
    ({"response_format": NAMED, "guided_json": SCHEMA}, Grammar("json_schema", STRICT)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
        Grammar("json_schema", STRICT),
    ),
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, Grammar("regex", "a")),
]


@pytest.mark.parametrize(("fields", "grammar"), ASKED, ids=lambda part: str(part)[:50])
async def test_every_way_to_ask_reaches_the_engine(
    server: Running, fields: dict[str, Any], grammar: Grammar
) -> None:
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "Hi"})):
        status, reply = await server.post(f"/v1/{path}", {**body, **fields})
        assert status == 200, reply
        assert server.engine.submitted[-1].params.grammar == grammar


@pytest.mark.parametrize("name", ["guided_grammar", "grammar", "ebnf"])
async def test_gbnf_is_made_lark(server: Running, name: str) -> None:
    assert (await server.post("/v1/chat/completions", {**CHAT, name: GBNF}))[0] == 200
    grammar = server.engine.submitted[-1].params.grammar
    assert grammar is not None
    assert (grammar.kind, "start:" in grammar.text) == ("lark", True)


TOOLS = {"tools": [tool("f")]}
CHOSEN = {**TOOLS, "tool_choice": chosen("f")}
REQUIRED = {**TOOLS, "tool_choice": "required"}
AUTO = {**TOOLS, "tool_choice": "auto"}
NONE = {**TOOLS, "tool_choice": "none"}
OF_ALL_OUTPUT: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"choice": ["a"]}},
    {"structured_outputs": {"json_object": True}},
    {"guided_json": SCHEMA},
    {"guided_choice": ["a"]},
    {"guided_regex": "a"},
    {"guided_grammar": LARK},
    {"json_schema": SCHEMA},
    {"regex": "a"},
    {"grammar": GBNF},
    {"ebnf": LARK},
]


@pytest.mark.parametrize("fields", OF_ALL_OUTPUT, ids=lambda part: str(part)[:50])
async def test_a_form_of_all_output_and_a_demanded_call_exclude_each_other(
    server: Running, fields: dict[str, Any]
) -> None:
    for choice in (CHOSEN, REQUIRED):
        both = {**CHAT, **choice, **fields}
        status, body = await server.post("/v1/chat/completions", both)
        name = next(iter(fields))
        assert (status, body["error"]["param"].split(".")[0]) == (400, name), body
        assert "tool_choice" in body["error"]["message"]
        # Named as well as the same form by OpenAI's name, it is refused all the same.
        same = {"response_format": {"type": "json_object"}}
        if "json_object" in str(fields):
            status, body = await server.post("/v1/chat/completions", {**both, **same})
            assert status == 400
    assert not server.engine.submitted


@pytest.mark.parametrize("form", [NAMED, LOOSE, {"type": "json_object"}])
async def test_response_format_is_of_replies_and_a_demanded_call_is_none(
    server: Running, form: dict[str, Any]
) -> None:
    for choice in (CHOSEN, REQUIRED):
        held = []
        for more in ({}, {"response_format": form}):
            body = {**CHAT, **choice, **more}
            assert (await server.post("/v1/chat/completions", body))[0] == 200
            held.append(server.engine.submitted[-1].params.grammar)
        assert held[0] is not None
        assert held[0] == held[1]


@pytest.mark.parametrize("fields", OF_ALL_OUTPUT, ids=lambda part: str(part)[:50])
async def test_a_form_and_tools_that_may_be_called(server: Running, fields: dict[str, Any]) -> None:
    """The reply is a call or has the form; a regular expression or a grammar is refused."""
    url = "/v1/chat/completions"
    status, body = await server.post(url, {**CHAT, **AUTO, **fields})
    if {"regex", "guided_regex", "guided_grammar", "grammar", "ebnf"} & fields.keys():
        assert (status, body["error"]["param"]) == (400, next(iter(fields))), body
    else:
        assert status == 200, body
        grammar = server.engine.submitted[-1].params.grammar
        assert grammar is not None
        assert "start: reply | open call" in grammar.text
    # Where nothing may be called, the form holds alone.
    assert (await server.post(url, {**CHAT, **NONE, **fields}))[0] == 200
    alone = server.engine.submitted[-1].params.grammar
    assert (await server.post(url, {**CHAT, **fields}))[0] == 200
    assert server.engine.submitted[-1].params.grammar == alone


async def test_demanded_calls_and_forms_at_the_other_doors(server: Running) -> None:
    """Both have a form of replies only: a demanded call is none."""
    schema = {"type": "json_schema", "name": "it", "schema": SCHEMA}
    function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    asked: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        (
            "/v1/responses",
            {"input": "Hi", "tools": [function], "tool_choice": {"type": "function", "name": "f"}},
            {"text": {"format": schema}},
        ),
        (
            "/v1/messages",
            {
                **CHAT,
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "tool", "name": "f"},
            },
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
    ]
    for path, body, form in asked:
        held = []
        for more in ({}, form):
            status, reply = await server.post(path, {**body, **more})
            assert status == 200, reply
            held.append(server.engine.submitted[-1].params.grammar)
        assert held[0] is not None
        assert held[0] == held[1]
        for name, value in (("structured_outputs", {"regex": "a"}), ("guided_regex", "a")):
            status, reply = await server.post(path, {**body, name: value})
            assert status == 400
            assert name in reply["error"]["message"]


async def test_nothing_asked_is_nothing_held(server: Running) -> None:
    await server.post("/v1/chat/completions", {**CHAT, "response_format": {"type": "text"}})
    assert server.engine.submitted[-1].params.grammar is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": NAMED, "guided_regex": "a"}, "guided_regex", "response_format"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "exactly one"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_choice": [1]}, "guided_choice[0]", "string"),
    ({"guided_json": "{"}, "guided_json", "EOF"),
    ({"guided_json": {"type": "thing"}}, "guided_json", "thing"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"$ref": "http://localhost/a.json"}}, "guided_json", "retriev"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "no text"),
    ({"guided_json": {"minLength": 2, "maxLength": 1, "type": "string"}}, "guided_json", ""),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    ({"guided_regex": "a" * (MAX_CHARS + 1)}, "guided_regex", str(MAX_CHARS)),
    ({"guided_json": {"enum": ["a" * MAX_CHARS]}}, "guided_json", str(MAX_CHARS)),
    ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "GBNF"),
    ({"grammar": "root ::= ("}, "grammar", "GBNF"),
    ({"ebnf": "start: nothing"}, "ebnf", "nothing"),
    ({"json_schema": {"uniqueItems": True}}, "json_schema", "uniqueItems"),
    ({"regex": "(a"}, "regex", "unclosed group"),
    ({"regex": "a", "guided_regex": "b"}, "regex", "guided_regex"),
    ({"grammar": GBNF, "json_schema": SCHEMA}, "grammar", "json_schema"),
    ({"grammar": 5}, "grammar", "string"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format", "text"),
    ({"response_format": {**LOOSE, "schema": {}}}, "response_format", "two different"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "json_schema"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern", ""),
]


@pytest.mark.parametrize(("fields", "param", "why"), REFUSED, ids=lambda part: str(part)[:50])
async def test_what_cannot_be_is_refused_by_name(
    server: Running, fields: dict[str, Any], param: str, why: str
) -> None:
    status, body = await server.post("/v1/chat/completions", {**CHAT, **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert why in body["error"]["message"]
    assert len(body["error"]["message"]) < 600
    assert not server.engine.submitted


async def test_hostile_grammars_are_refused_in_time_and_hold_nobody_up(server: Running) -> None:
    """A stream of a token every 20 ms goes on beside them, and good ones are served after them."""
    long, short = Scripted(ids("x" * 3000), "length"), Scripted(ids("x"), "length")
    server.engine.script = lambda request, index: short if request.params.grammar else long
    server.engine.step_seconds = 0.02
    arrived: list[float] = []

    async def stream() -> None:
        body = {**CHAT, "stream": True}
        async with server.http.post(server.url + "/v1/chat/completions", json=body) as response:
            while await response.content.readline():
                arrived.append(time.monotonic())

    streaming = asyncio.create_task(stream())
    nested: dict[str, Any] = {}
    for _ in range(90):
        nested = {"properties": {"a": nested}}
    hostile: list[tuple[str, Any, int]] = [
        ("guided_json", ENDLESS, 400),
        ("guided_grammar", DEEP, 400),
        ("guided_json", {"type": "string", "minLength": 10**9}, 200),
        ("guided_json", {"type": "array", "minItems": 10**9}, 200),
        ("guided_json", {"enum": [f"{i * 7919}" for i in range(9000)]}, 200),
        ("guided_json", json.dumps(nested), 400),
        ("guided_regex", "((a{1,1000}){1,1000}){1,1000}", 200),
        ("guided_regex", "(a*)*(a*)*(a*)*b", 200),
        ("guided_regex", "a{1,1000000}", 200),
    ]
    for name, value, expected in hostile:
        start = time.monotonic()
        status, body = await server.post("/v1/completions", {"prompt": "a", name: value})
        assert status == expected, (name, str(value)[:80], body)
        if status == 400:
            assert body["error"]["param"] == name
        assert time.monotonic() - start < 12
    good = {"prompt": "a", "guided_json": SCHEMA}
    assert (await server.post("/v1/completions", good))[0] == 200
    streaming.cancel()
    gaps = [after - before for before, after in pairwise(arrived)]
    assert len(gaps) > 20
    assert max(gaps) < 1.0


async def test_a_checker_remembers_and_bounds_who_waits(checker: Checker) -> None:
    grammar = Grammar("regex", "[a-z]{3}x")
    await checker.check(grammar)
    start = time.monotonic()
    for _ in range(100):
        await checker.check(grammar)
    assert time.monotonic() - start < 0.5
    many = [checker.check(Grammar("regex", f"a{i}(")) for i in range(MAX_WAITING_OF_ONE + 9)]
    outcomes = await asyncio.gather(*many, return_exceptions=True)
    full = [type(o) for o in outcomes].count(QueueFull)
    assert 9 - PROCESSES <= full <= 9
    assert [type(o) for o in outcomes].count(GrammarError) == len(many) - full


async def test_a_grammar_that_only_a_large_stack_holds_is_refused(checker: Checker) -> None:
    """The engine compiles on a thread, which may have a quarter of the checking process's."""
    for rules, fits in ((200, True), (1500, False)):
        chain = [f"r{i}: r{i + 1}" for i in range(rules)]
        grammar = Grammar("lark", "\n".join(["start: r0", *chain, f'r{rules}: "a"']))
        with nullcontext() if fits else pytest.raises(GrammarError, match="stack"):
            await checker.check(grammar)


def test_json_has_no_more_than_one_line_and_its_indent_between_tokens() -> None:
    tokenizer = lexicon(byte_tokenizer(), 258).load()
    matcher = compiled(Grammar("json_schema", '{"type": "array", "items": {}}'), tokenizer)
    good = ["[1,2]", "[ 1, 2 ]", '[\n  1,\n  {\n    "a": 2\n  }\n]']
    for text, fits in [(t, True) for t in good] + [(t, False) for t in ("[  1]", "[\n\n1]", " []")]:
        tokens = ids(text)
        own = matcher.deep_copy()
        assert (own.try_consume_tokens(tokens) == len(tokens) and own.is_stopped()) == fits, text


def test_special_and_unknown_tokens_are_never_part_of_a_text() -> None:
    tokenizer = byte_tokenizer()
    special = set(tokenizer.all_special_ids)
    matcher = compiled(Grammar("regex", "(?s:.)+"), lexicon(tokenizer, 300).load())
    assert all(matcher.validate_tokens([token]) == 0 for token in [*special, 280, 299])
    assert all(matcher.validate_tokens([token]) == 1 for token in ids("a<é\n")[:3])


@pytest.mark.parametrize("prefixed", [False, True])
def test_the_pieces_of_a_sentencepiece_vocabulary_are_known_by_their_bytes(prefixed: bool) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", '"']
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    loaded = Lexicon(tokenizer.to_str(), len(vocab), (2,)).load()
    matcher = compiled(Grammar("regex", '" a\u00e9"'), loaded)
    for text in (['"', "▁a", "<0xC3>", "<0xA9>", '"'], ['"', "▁", "a", "<0xC3>", "<0xA9>", '"']):
        own = matcher.deep_copy()
        assert own.consume_tokens([vocab[piece] for piece in text])
        assert own.is_stopped()
