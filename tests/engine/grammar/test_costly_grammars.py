"""Grammars that become expensive while a row follows them fail alone, and within bounds."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import numpy as np
import pytest
from support.engine.bench import Bench
from support.engine.grammars import ENDS, TOKENIZER, compiler
from support.engine.reference import solo_tokens
from support.tiny import SPECIALS, VOCAB_SIZE, tiny_model

from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.grammar.language import Lexicon, compiled
from chairlift.engine.grammar.trial import middle, walk
from chairlift.engine.messages import Grammar

PROMPT = [7, 8, 9]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "stop_token_ids": ENDS}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def make_bench(model: Any, **options: Any) -> Bench:
    return Bench(model, **{"compiler": compiler(), **options})


def text(bench: Bench, name: str) -> str:
    tokens = [token for token in bench.tokens(name) if token not in ENDS]
    assert not any(token < len(SPECIALS) for token in tokens)
    return str(TOKENIZER.decode(tokens))


def finish(bench: Bench, name: str) -> str | None:
    return bench.outputs[name, 0][-1].finish


# Cheap for as many tokens as the check of a request tries, then cubic in the number of letters.
LATE = Grammar("lark", 'start: /[a-z]{24}/ a "!"\na: a a a | a a | /[a-z]/ |')


@pytest.mark.slow
def test_a_grammar_that_becomes_expensive_fails_alone(model: Any) -> None:
    walk(Lexicon(TOKENIZER.to_str(), VOCAB_SIZE, ENDS).load(), LATE)  # passes the check
    bench = make_bench(model, rows=4)
    no_end = {TOKENIZER.encode("!").ids[0]: -100.0}
    bench.submit("hard", PROMPT, 1500, grammar=LATE, seed=1, logit_bias=no_end, **SAMPLED)
    bench.submit("free", [*PROMPT, 1], 90)
    bench.submit(
        "constrained", PROMPT, 90, grammar=Grammar("regex", "[abc]{99}d"), seed=2, **SAMPLED
    )
    began = time.process_time()
    bench.drain()
    assert time.process_time() - began < 60
    assert finish(bench, "hard") == "error"
    assert 24 < len(bench.tokens("hard")) < 1500
    free = bench.tokens("free")
    assert free == solo_tokens(model, [*PROMPT, 1], 90, free)
    alone = make_bench(model)
    alone.submit(
        "constrained", PROMPT, 90, grammar=Grammar("regex", "[abc]{99}d"), seed=2, **SAMPLED
    )
    alone.drain()
    assert bench.tokens("constrained") == alone.tokens("constrained")


# Its lexer needs a state for each number of letters of each level, more than the limits allow.
MANY_STATES = Grammar("lark", "start: /((a{1,99}){1,99}){1,99}b/")


def test_a_grammar_whose_lexer_has_overflowed_is_compiled_anew(model: Any) -> None:
    bench = make_bench(
        model, compiler=Compiler(lambda: Lexicon(TOKENIZER.to_str(), VOCAB_SIZE, ENDS))
    )
    letter = {TOKENIZER.encode("a").ids[0]: 100.0}
    bench.submit("far", PROMPT, 400, grammar=MANY_STATES, logit_bias=letter)
    bench.drain()
    assert finish(bench, "far") == "error"
    assert "too many expressions" in str(bench.outputs["far", 0][-1].error)
    bench.submit("near", PROMPT, 5, grammar=MANY_STATES, logit_bias=letter)
    bench.drain()
    assert (finish(bench, "near"), text(bench, "near")) == ("length", "aaaaa")


def test_thousands_of_choices_are_one_grammar(model: Any) -> None:
    bench = make_bench(model)
    choices = [f"number {number}" for number in range(4000)]
    bench.submit("pick", PROMPT, 20, grammar=Grammar("choice", json.dumps(choices)), **SAMPLED)
    bench.drain()
    assert finish(bench, "pick") == "stop"
    assert text(bench, "pick") in choices


@pytest.mark.parametrize("seed", range(3))
def test_no_mask_of_an_ambiguous_grammar_takes_long(seed: int) -> None:
    draw = random.Random(seed)
    for body in (
        "a a a | a a | /[a-z]/ |",
        "a a | b*\nb: /[a-z]/ | /[a-z]+/ |",
        "/[a-z]/ a | a a |",
    ):
        grammar = Grammar("lark", f"start: /[a-z]{{24}}/ a\na: {body}")
        matcher = compiled(grammar, Lexicon(TOKENIZER.to_str(), VOCAB_SIZE, ENDS).load())
        began = time.thread_time()
        for _ in range(80):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if matcher.is_error() or matcher.is_stopped():
                break
            assert time.thread_time() - began < 1
            matcher.consume_token(
                draw.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
            )
            began = time.thread_time()


@pytest.mark.parametrize("tokens", [{0}, {7, 8}, {3, 17, 90}, set(range(5, 96)), {95}])
def test_the_middle_token_of_a_mask(tokens: set[int]) -> None:
    mask = sum(1 << token for token in tokens).to_bytes(12, "little")
    assert middle(mask) == sorted(tokens)[len(tokens) // 2]
