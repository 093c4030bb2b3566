"""Drafts of constrained rows change no token, and forced tokens come along."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.engine.bench import Bench
from support.engine.drafts import oracles, verify_any
from support.engine.grammars import compiler
from support.tiny import tiny_model

from chairlift.engine.messages import Grammar, SamplingParams, Submit, Thinking
from chairlift.engine.model import attention

SCHEMA = {
    "type": "object",
    "properties": {f"field_number_{i}": {"type": "boolean"} for i in range(20)},
    "required": [f"field_number_{i}" for i in range(20)],
    "additionalProperties": False,
}
COUNTED = """%llguidance {}

start: "Ada is " age " and lives in " TOWN

age[capture, max_tokens=5]: AGE
AGE: /[0-9]{1,2}/
TOWN: "London" | "Paris"
"""
CONSTRAINTS: list[dict[str, Any]] = [
    {"grammar": Grammar("regex", "(ab|cd){3,9}[x-z]*")},
    {"grammar": Grammar("choice", json.dumps(["monday", "tuesday", "monkey"]))},
    {"grammar": Grammar("json_schema", json.dumps(SCHEMA))},
    {"grammar": Grammar("lark", COUNTED)},
    {"thinking": Thinking(end=(9, 10), budget=5)},
    {"grammar": Grammar("regex", "(ab|cd){3,9}"), "thinking": Thinking(end=(9, 10), budget=5)},
    {},
]


def _model() -> Any:
    model = tiny_model("llama", seed=6)
    attention.install(model)
    return model


def _serve(bench: Bench, seed: int) -> dict[str, list[list[int]]]:
    random_ = random.Random(seed)
    for number in range(12):
        prompt = [random_.randrange(3, 250) for _ in range(random_.randrange(1, 30))]
        params = random_.choice(CONSTRAINTS) | {
            "temperature": random_.choice([0.0, 1.0]),
            "stop_token_ids": (0,),
        }
        bench.submit(str(number), prompt, random_.randrange(1, 60), **params)
        for _ in range(random_.randrange(6)):
            if not bench.core.idle:
                bench.step()
    bench.drain()
    assert all(output.error is None for outputs in bench.outputs.values() for output in outputs)
    return {str(number): [bench.tokens(str(number))] for number in range(12)}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_tokens_are_those_without_drafts(wrong: float) -> None:
    model = _model()
    seed = int(10 * wrong)
    expected = _serve(Bench(model, compiler=compiler()), seed)
    bench = Bench(model, compiler=compiler(), draft=5, propose=oracles(expected, wrong))
    verified = verify_any(bench.core)
    assert _serve(bench, seed) == expected
    assert len(verified) > 10


@pytest.mark.slow
def test_forced_tokens_of_a_schema_take_no_steps_of_their_own() -> None:
    """Here a byte is a token. A step costs the same with and without a draft."""
    model = _model()
    prompt = [20, 30, 40]
    params = SamplingParams(
        600, 1, temperature=0.0, stop_token_ids=(0,), grammar=CONSTRAINTS[2]["grammar"]
    )
    steps: list[int] = []
    texts: list[list[int]] = []
    for draft in (0, 16):
        bench = Bench(model, compiler=compiler(), draft=draft)
        verify_all(bench)
        bench.core.submit(Submit("0", prompt, params))
        bench.drain()
        steps.append(len(bench.stats))
        texts.append(bench.tokens("0"))
    assert texts[0] == texts[1]
    assert steps[1] <= 0.6 * steps[0]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[ab]{50}", "a*b", "(aa|bb){20}", "(abc){15}"])
@pytest.mark.parametrize("seed", [6, 7])
def test_a_row_without_a_draft_keeps_to_its_grammar_beside_rows_with_drafts(
    text: str, seed: int
) -> None:
    """Recurrent rows need drafts of one length. A filler equal to the next token had been kept."""
    model = tiny_model("lfm2", seed=seed)
    attention.install(model)
    plain = Bench(model, rows=4)
    plain.submit("p", [5, 6, 7], 80)
    plain.drain()
    tokens: list[dict[str, list[int]]] = []
    for draft in (0, 5):
        bench = Bench(model, draft=draft, compiler=compiler(), rows=4)
        bench.submit("p", [5, 6, 7], 80, reading={"prediction": plain.tokens("p")})
        for number in range(3):
            bench.submit(
                *(f"g{number}", [40 + number, 41, 42], 60),
                grammar=Grammar("regex", text),
                stop_token_ids=(0, 2),
            )
        bench.drain()
        assert {name: bench.outputs[name][-1].error for name in bench.outputs} == dict.fromkeys(
            bench.outputs
        )
        tokens.append({name: bench.tokens(name[0]) for name in bench.outputs})
    assert draft == 0 or sum(sum(stats.accepted_tokens) for stats in bench.stats) > 10
    assert tokens[0] == tokens[1]


def verify_all(bench: Bench) -> None:
    scheduler = bench.core.scheduler
    scheduler.choose_drafts = (
        lambda drafts: {  # type: ignore[method-assign]
            sequence: draft.tokens[: sequence.max_total_tokens - sequence.num_tokens - 1]
            for sequence, draft in drafts.items()
        }
    )


def test_rules_that_count_tokens_count_none_of_a_draft() -> None:
    model = _model()
    texts = []
    for draft in (0, 16):
        bench = Bench(model, compiler=compiler(), draft=draft)
        verify_all(bench)
        bench.submit("0", [20, 30], 40, grammar=Grammar("lark", COUNTED), stop_token_ids=(0,))
        bench.drain()
        texts.append(bench.tokens("0"))
    assert texts[0] == texts[1]
    assert len(texts[0]) > 25
