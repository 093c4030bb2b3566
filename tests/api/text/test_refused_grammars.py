"""Grammars that cannot be compiled in time, or at all, are refused with the field's name."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from support.api.api_server import CHAT, Running, ids, running
from support.api.fake_engine import FakeEngine, Scripted, byte_tokenizer, model_info

from chairlift.engine.errors import GrammarError, QueueFull, UnsupportedModel
from chairlift.engine.grammar.checker import Checker
from chairlift.engine.grammar.language import MAX_CHARS, lexicon
from chairlift.engine.messages import Grammar
from chairlift.engine.workers.job import Job
from chairlift.engine.workers.pool import MAX_WAITING_OF_ONE, PROCESSES, Workers

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
LOOSE = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
GBNF = 'root ::= "a" [0-9]+'

# Grammars known to compile forever or to overflow the stack.
ENDLESS = {"type": "integer", "multipleOf": 9_999_991}
RULES = "\n".join(f'r{i}: "a" | r{(i + 1) % 4000}' for i in range(4000))
DEEP = "start: " + " ".join(f"r{i}" for i in range(4000)) + "\n" + RULES


@pytest.fixture
async def server(checker: Checker) -> AsyncIterator[Running]:
    engine = FakeEngine(model_info(), lambda request, index: Scripted(ids("text")))
    async with running(engine) as server:
        vocabulary = server.service.loaded.vocabulary  # type: ignore[union-attr]
        vocabulary.grammars = checker
        yield server


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
    ({"guided_json": '{"items":' * 600 + "{}" + "}" * 600}, "guided_json", "deep"),
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
async def test_a_bad_grammar_is_refused_by_name(
    server: Running, fields: dict[str, Any], param: str, why: str
) -> None:
    status, body = await server.post("/v1/chat/completions", {**CHAT, **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert why in body["error"]["message"]
    assert len(body["error"]["message"]) < 600
    assert not server.engine.submitted


@pytest.mark.slow
async def test_hostile_grammars_are_refused_in_time_and_delay_no_stream(server: Running) -> None:
    """A stream with a token every 20 ms continues meanwhile; valid grammars still work after."""
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
        assert time.monotonic() - start < 60
    good = {"prompt": "a", "guided_json": SCHEMA}
    assert (await server.post("/v1/completions", good))[0] == 200
    streaming.cancel()
    gaps = [after - before for before, after in pairwise(arrived)]
    assert len(gaps) > 20
    assert max(gaps) < 4.0


async def test_a_checker_caches_results_and_bounds_its_queue(checker: Checker) -> None:
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


async def test_a_grammar_that_needs_a_large_stack_is_refused(checker: Checker) -> None:
    """The engine compiles in a thread, whose stack may be a quarter of the checker process's."""
    for rules, fits in ((200, True), (1500, False)):
        chain = [f"r{i}: r{i + 1}" for i in range(rules)]
        grammar = Grammar("lark", "\n".join(["start: r0", *chain, f'r{rules}: "a"']))
        with nullcontext() if fits else pytest.raises(GrammarError, match="stack"):
            await checker.check(grammar)


@pytest.fixture
def jobs(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that the workers have got during the test."""
    jobs, run = list[Job](), workers.run

    async def counted(job: Job) -> Any:
        jobs.append(job)
        return await run(job)

    monkeypatch.setattr(workers, "run", counted)
    return jobs


async def test_a_vocabulary_without_an_end_token_is_tried_once(
    workers: Workers, jobs: list[Job]
) -> None:
    """A process takes up to a second to find out."""
    checker = Checker(lambda: replace(lexicon(byte_tokenizer(), 258), ends=()), workers)
    for text in ("a", "b", "c"):
        with pytest.raises(UnsupportedModel, match="eos_token"):
            await checker.check(Grammar("regex", text))
    assert len(jobs) == 1


@pytest.mark.parametrize("valid", [True, False])
async def test_a_burst_of_requests_with_the_same_grammar_tries_it_once(
    checker: Checker, jobs: list[Job], valid: bool
) -> None:
    """More of them than a client may have jobs."""
    count = 3 * MAX_WAITING_OF_ONE
    grammar = Grammar("regex", "a{3,7}burst" if valid else "a{3,7}burst(")
    checks = [checker.check(grammar) for _ in range(count)]
    results = await asyncio.gather(*checks, return_exceptions=True)
    assert len(set(map(str, results))) == 1
    assert isinstance(results[0], GrammarError) is not valid
    assert len(jobs) == 1
    larks = [checker.as_lark('root ::= "burst"') for _ in range(count)]
    assert len(set(await asyncio.gather(*larks))) == 1
    assert len(jobs) == 2
