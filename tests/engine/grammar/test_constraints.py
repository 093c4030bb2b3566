"""Rows constrained by a grammar: in a batch, preempted, resumed, after a thought, failing."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from support.engine.bench import Bench
from support.engine.grammars import ENDS, TOKENIZER, compiler
from support.engine.reference import solo_tokens
from support.tiny import EOS_ID, SPECIALS, VOCAB_SIZE, tiny_model

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.grammar.constraint import Constraint
from chairlift.engine.grammar.effort import SECONDS, SECONDS_PER_TOKEN, Effort
from chairlift.engine.grammar.language import Lexicon
from chairlift.engine.messages import Grammar, Resumed, SamplingParams, Submit, Thinking
from chairlift.engine.model.trials.probe import probe

PROMPT = [7, 8, 9]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "parts"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "object": Grammar("json_object"),
    "regex": Grammar("regex", "[a-f]{4}-[0-9]{2,3}"),
    "choice": Grammar("choice", json.dumps(["yes", "no", "perhaps \u00e9\U0001f600"])),
    "lark": Grammar("lark", 'start: "(" start ")" | DIGIT+\nDIGIT: /[0-9]/'),
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "stop_token_ids": ENDS}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def make_bench(model: Any, **options: Any) -> Bench:
    return Bench(model, **{"compiler": compiler(), **options})


def text(bench: Bench, name: str, index: int = 0) -> str:
    tokens = [token for token in bench.tokens(name, index) if token not in ENDS]
    assert not any(token < len(SPECIALS) for token in tokens)
    return str(TOKENIZER.decode(tokens))


def finish(bench: Bench, name: str, index: int = 0) -> str | None:
    return bench.outputs[name, index][-1].finish


def _is_allowed(name: str, reply: str) -> bool:
    """Whether the grammar of this name allows a reply."""
    if name == "schema":
        value = json.loads(reply)
        return (
            set(value) == {"name", "size", "parts"}
            and len(value["name"]) <= 6
            and value["size"] in ("small", "large")
            and 1 <= len(value["parts"]) <= 3
        )
    if name == "regex":
        return re.fullmatch("[a-f]{4}-[0-9]{2,3}", reply) is not None
    if name == "choice":
        return reply in ("yes", "no", "perhaps \u00e9\U0001f600")
    balanced = reply.count("(") == reply.count(")")
    return balanced and re.fullmatch(r"\(*[0-9]+\)*", reply) is not None


def _submit_all(bench: Bench) -> None:
    for number, (name, grammar) in enumerate(GRAMMARS.items()):
        bench.submit(name, PROMPT, 300, grammar=grammar, seed=number, n=2, **SAMPLED)
        bench.submit(f"free {name}", [*PROMPT, number], 20 + number)
        bench.step()


@pytest.fixture(scope="module")
def alone(model: Any) -> dict[str, list[list[int]]]:
    """The tokens of two choices of each grammar in an engine that serves nothing else."""
    bench = make_bench(model)
    for number, name in enumerate(GRAMMARS):
        bench.submit(name, PROMPT, 300, grammar=GRAMMARS[name], seed=number, n=2, **SAMPLED)
        bench.drain()
    return {name: [bench.tokens(name, index) for index in range(2)] for name in GRAMMARS}


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_every_kind_gives_the_same_tokens_in_a_mixed_batch_and_alone(
    model: Any, alone: dict[str, list[list[int]]], eager: bool
) -> None:
    bench = make_bench(model, eager=eager, rows=16)
    _submit_all(bench)
    bench.drain()
    for number, name in enumerate(GRAMMARS):
        free = bench.tokens(f"free {name}")
        assert free == solo_tokens(model, [*PROMPT, number], 20 + number, free)
        for index in range(2):
            assert bench.tokens(name, index) == alone[name][index], name
            if finish(bench, name, index) == "stop" and name != "object":
                assert _is_allowed(name, text(bench, name, index)), text(bench, name, index)
        assert name == "object" or "stop" in {finish(bench, name, index) for index in range(2)}
    assert text(bench, "object").lstrip().startswith("{")
    assert sum(stats.phases.get("mask", 0) for stats in bench.stats) > 0


def test_a_complete_reply_ends_and_an_extendable_one_continues(model: Any) -> None:
    """After "ab" nothing may follow, so no end token is needed; after "x" more may follow."""
    bench = make_bench(model)
    bench.submit("complete", PROMPT, 50, grammar=Grammar("regex", "ab"), min_tokens=20, **SAMPLED)
    bench.submit("open", PROMPT, 50, grammar=Grammar("regex", "x+"), min_tokens=9, **SAMPLED)
    bench.submit("cut", PROMPT, 7, grammar=Grammar("regex", "y{20}"), **SAMPLED)
    bench.drain()
    assert (text(bench, "complete"), finish(bench, "complete")) == ("ab", "stop")
    assert not bench.outputs["complete", 0][-1].ended_by_token
    assert re.fullmatch("x{9,}", text(bench, "open"))
    assert (text(bench, "cut"), finish(bench, "cut")) == ("yyyyyyy", "length")


def test_sampling_parameters_apply_to_the_allowed_tokens(model: Any) -> None:
    a, b, c = (TOKENIZER.encode(letter).ids[0] for letter in "abc")
    grammar = Grammar("regex", "[abc]{12}")
    bench = make_bench(model)
    bench.submit("bias", PROMPT, 12, grammar=grammar, logit_bias={b: 100.0, 200: 100.0})
    bench.submit("top", PROMPT, 12, grammar=grammar, top_k=1, temperature=1.5)
    bench.submit("greedy", PROMPT, 12, grammar=grammar, logprobs=2)
    bench.submit("again", PROMPT, 12, grammar=grammar, frequency_penalty=2.0, repetition_penalty=9)
    bench.drain()
    assert bench.tokens("bias") == [b] * 12
    assert bench.tokens("top") == bench.tokens("greedy")
    assert set(bench.tokens("greedy")) <= {a, b, c}
    assert len(set(bench.tokens("again"))) > 1
    # Log-probabilities are the model's: the likeliest token is not an allowed one.
    (first,) = bench.outputs["greedy", 0][0].logprobs or []
    assert first.top[0][0] == solo_tokens(model, PROMPT, 1)[0]
    assert first.logprob < first.top[0][1]


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_preempted_rows_continue_with_the_same_tokens(model: Any) -> None:
    grammar = Grammar("regex", "([a-z]+ ){200}")
    bytes_per_token = probe(model, "test").geometry.bytes_per_token
    ample, tight = make_bench(model), make_bench(model, kv=130 * bytes_per_token)
    for bench in (ample, tight):
        for i in range(5):
            bench.submit(str(i), PROMPT, 40, grammar=grammar, seed=i, **SAMPLED)
        bench.drain()
    assert sum(stats.preemptions for stats in tight.stats) > 0
    assert not sum(stats.preemptions for stats in ample.stats)
    for i in range(5):
        assert tight.tokens(str(i)) == ample.tokens(str(i))
        assert re.fullmatch("([a-z]+ )*[a-z]*", text(tight, str(i)))


@pytest.mark.slow
def test_a_resumed_row_continues_with_the_same_tokens(model: Any) -> None:
    thinking = Thinking(end=(60, 61), budget=5)
    params = SamplingParams(
        max_tokens=100, seed=3, grammar=GRAMMARS["schema"], thinking=thinking, **SAMPLED
    )
    bench = make_bench(model)
    bench.core.submit(Submit("r", PROMPT, params))
    bench.drain()
    tokens = bench.tokens("r")
    other, places = make_bench(model), (3, 6, len(tokens) // 2, len(tokens) - 1)
    for begun in places:
        resumed = (Resumed(0, tokens[:begun], 0, 1.0, 1.0, 1.0),)
        other.core.submit(Submit(str(begun), PROMPT, params, resumed=resumed))
    other.drain()
    for begun in places:
        assert other.tokens(str(begun)) == tokens[begun:]


def test_the_grammar_applies_after_the_thought(model: Any) -> None:
    end, yes = (60, 61), [TOKENIZER.encode(letter).ids[0] for letter in "yes"]
    grammar = Grammar("choice", '["yes"]')
    bench = make_bench(model)
    common: dict[str, Any] = {"count": 40, "grammar": grammar, **SAMPLED}
    bias = {60: -100.0, EOS_ID: 100.0}
    bench.submit("forced", PROMPT, thinking=Thinking(end, 6), logit_bias=bias, **common)
    bench.submit("own", PROMPT, thinking=Thinking(end), logit_bias={60: 30.0, 61: 30.0}, **common)
    common["logit_bias"] = {50: -100.0}
    bench.submit("none", PROMPT, thinking=Thinking(end, 6, start=50), **common)
    common["logit_bias"] = {50: 100.0}
    bench.submit("begun", PROMPT, thinking=Thinking(end, 0, start=50), **common)
    del common["grammar"], common["logit_bias"]
    common["logit_bias"] = {60: -100.0}
    bench.submit("free", PROMPT, thinking=Thinking(end, 2), **common)
    bench.drain()
    assert bench.tokens("forced")[6:] == [*end, *yes]
    assert EOS_ID not in bench.tokens("forced")
    own = bench.tokens("own")
    assert own[-5:] == [*end, *yes]
    assert own.index(61) < 20
    assert bench.tokens("none") == yes
    assert bench.tokens("begun") == [50, *end, *yes]
    assert bench.tokens("free")[2:4] == [60, 61]
    assert len(bench.tokens("free")) > 4


def test_a_grammar_that_fails_in_the_engine_fails_its_request_alone(model: Any) -> None:
    bench = make_bench(model)
    for name in ("bad", "as bad"):
        bench.submit("good", PROMPT, 20) if name == "bad" else None
        bench.submit(name, PROMPT, n=2, grammar=Grammar("regex", "(a"))
        bench.drain()
        for index in range(2):
            (output,) = bench.outputs[name, index]
            assert (output.finish, output.client_error) == ("error", True)
            assert "cannot follow this request's grammar" in str(output.error)
    assert bench.tokens("good") == solo_tokens(model, PROMPT, 20, bench.tokens("good"))
    assert [choice.reason for choice in bench.finished].count("error") == 4
    without = Bench(model)
    without.submit("none", PROMPT, grammar=GRAMMARS["regex"])
    without.drain()
    assert "tokenizer" in str(without.outputs["none", 0][-1].error)


def test_a_row_whose_constraint_fails_ends_alone(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Constraint.take
    taken = iter([None, None, None, RuntimeError("no state")])

    def failing(self: Constraint, tokens: list[int]) -> None:
        if self._ends == (99,) and (error := next(taken)):
            raise error
        original(self, tokens)

    monkeypatch.setattr(Constraint, "take", failing)
    bench = make_bench(model)
    grammar = Grammar("regex", "[ab]{30}")
    bench.submit("bad", PROMPT, 30, grammar=grammar, stop_token_ids=(99,))
    bench.submit("other", PROMPT, 30, grammar=grammar)
    bench.submit("good", PROMPT, 30)
    bench.drain()
    last = bench.outputs["bad", 0][-1]
    assert (last.finish, len(bench.tokens("bad"))) == ("error", 2)
    assert "RuntimeError: no state" in str(last.error)
    assert len(bench.tokens("other")) == 30
    assert bench.tokens("other")[:2] == bench.tokens("bad")
    assert bench.tokens("good") == solo_tokens(model, PROMPT, 30, bench.tokens("good"))


def test_grammars_are_compiled_once_and_counted(model: Any) -> None:
    counting = Compiler(lambda: Lexicon(TOKENIZER.to_str(), VOCAB_SIZE, ENDS))
    bench = make_bench(model, compiler=counting)
    for i in range(3):
        bench.submit(str(i), PROMPT, 5, grammar=GRAMMARS["schema"])
    bench.submit("the server's", PROMPT, 5, reading={"replay": True}, grammar=GRAMMARS["schema"])
    bench.drain()
    assert sum(stats.grammar_hits for stats in bench.stats) == 2
    assert len([s for stats in bench.stats for s in stats.grammar_seconds]) == 1


@pytest.mark.slow
def test_the_effort_of_a_row_counts_its_own_cpu_time() -> None:
    def compute(seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    effort = Effort()
    with effort.alone():
        time.sleep(0.05)  # waiting is not CPU time
    assert (effort.suspect, effort.seconds < 0.02) == (False, True)
    with effort.following(2):
        compute(0.02)
    assert effort.suspect
    with effort.following(1):
        pass
    assert effort.suspect  # until its mask has been computed alone
    with effort.alone():
        pass
    assert not effort.suspect
    effort.check()
    with effort.alone():
        compute(SECONDS + 3 * SECONDS_PER_TOKEN)
    with pytest.raises(GrammarError, match=r"takes too long: 1\.0 s for 3 tokens"):
        effort.check()
    effort.tokens = 1000
    effort.check()
