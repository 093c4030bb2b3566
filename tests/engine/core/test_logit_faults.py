"""A row whose logits are not finite ends with an error within a step; other rows are unaffected.

Covers the CPU's steps, and the GPUs': packed and padded ones, and queued ones, whose buffers are
written while the previous step still runs.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import cycle, product
from typing import Any

import mlx.core as mx
import pytest
from support.engine.core import build_core
from support.engine.grammars import compiler
from support.engine.logit_faults import VALUES, Faults
from support.engine.pages import HostPages
from support.tiny import VOCAB_SIZE, tiny_model

from chairlift.engine.cpu import kernels
from chairlift.engine.messages import FinishReason, Grammar, SamplingParams, StepStats, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.attention import names_of
from chairlift.engine.model.trials.probe import probe
from chairlift.scheduler.limits import Limits

# On a GPU the path of the CPU, with its kernels, is none that an engine takes.
ON_CPU = mx.default_device() == mx.Device(mx.cpu)
PATHS = ("cpu", "packed", "queued") if ON_CPU else ("packed", "queued")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "logit_bias": {9: 1.0}}
NEIGHBOURS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": ([7, 8, 9], {"temperature": 0.0, "logprobs": 2}),
    "sampled": ([17, 18, 19, 20], SAMPLED),
    "two": ([27, 28] * 9, {"temperature": 1.0, "n": 2, "frequency_penalty": 1.0}),
    "constrained": ([37], {"temperature": 1.0, "grammar": Grammar("regex", "[a-f]{14}")}),
}
LATE = ([47, 48], {"temperature": 0.7, "min_p": 0.01})
BAD = list(range(60, 81))


class Run:
    """An engine of one of the paths, stepped by hand.

    Attributes:
        tokens: the tokens of each choice.
        ends: each choice's finish reason, error and number of steps.
    """

    def __init__(self, path: str) -> None:
        model = tiny_model("llama", seed=3)
        names = names_of(model)
        names["swiglu"] = getattr(names["swiglu"], "replaces", names["swiglu"])
        if path == "cpu":
            kernels.install(model)
        else:
            attention.install(model)
        geometry, vocabulary, _ = probe(model, "llama")
        limits = Limits(16, 24, 1 << 21, geometry)
        if path != "cpu":
            limits = Limits(
                *(16, 24, 1 << 21, geometry),
                chunk_multiple=8,
                avoid_partial_prefill=True,
                bands=2,
                band_bytes=1024,
            )
        self.core = build_core(
            *(model, vocabulary, limits, path == "cpu"),
            kernels=HostPages() if path == "queued" else None,
            compiler=compiler(),
        )
        assert self.core.pipeline.forward.packs
        assert self.core.batch.queued == (path == "queued")
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], tuple[FinishReason, str | None, int]] = {}
        self.stats: list[StepStats] = []
        self.computed = 0

    def submit(self, name: str, prompt: list[int], **params: Any) -> None:
        n = params.pop("n", 1)
        given = SamplingParams(**({"max_tokens": 12, "seed": 5} | params))
        self.core.submit(Submit(name, prompt, given, n))

    def step(self) -> None:
        output = self.core.step()
        self.core.scheduler.check_integrity()
        self.stats.append(output.stats)
        self.computed += output.stats.prefill_tokens + output.stats.decode_tokens > 0
        for choice in output.outputs:
            key = choice.request_id, choice.index
            self.tokens.setdefault(key, []).extend(choice.token_ids)
            if choice.finish is not None:
                self.ends[key] = choice.finish, choice.error, self.computed

    def drain(self) -> None:
        while not self.core.idle or self.core.scheduler.waiting:
            self.step()

    def serve(self, bad: dict[str, Any]) -> None:
        """Serves neighbours, then the bad request with another, and one more 6 steps later."""
        for name, (prompt, params) in NEIGHBOURS.items():
            self.submit(name, prompt, **params)
            self.step()
        self.submit("bad", BAD, **bad)
        self.submit("beside", [57] * 5, **SAMPLED)
        for _ in range(6):
            self.step()
        self.submit("late", *LATE[:1], **LATE[1])
        self.drain()


BAD_REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 3},
    "sampled": {**SAMPLED, "n": 2, "top_k": 5, "repetition_penalty": 1.3},
    "constrained": {"temperature": 1.0, "grammar": Grammar("regex", "[x-z]{12}")},
}


@cache
def undisturbed(path: str, bad: str) -> dict[tuple[str, int], list[int]]:
    run = Run(path)
    run.serve(BAD_REQUESTS[bad])
    assert {finish for finish, _, _ in run.ends.values()} <= {"length", "stop"}
    return run.tokens


# Every path meets every kind of value; ``at`` 0 is the prompt's last position.
CASES = [
    (path, kind, bad, at)
    for (path, kind, at), bad in zip(product(PATHS, VALUES, (0, 3)), cycle(BAD_REQUESTS))
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "kind", "bad", "at"), CASES)
def test_a_nonfinite_row_fails_alone_and_within_a_step(
    path: str,
    kind: str,
    bad: str,
    at: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If the request has two choices, the second fails."""
    caplog.set_level(logging.ERROR)
    expected = undisturbed(path, bad)
    run = Run(path)
    failing = "bad", BAD_REQUESTS[bad].get("n", 1) - 1
    run.core.pipeline.forward = faults = Faults(run.core, failing, at, kind)  # type: ignore[assignment]
    run.serve(BAD_REQUESTS[bad])
    assert faults.faulty_call is not None
    finish, error, step = run.ends.pop(failing)
    assert finish == "error"
    assert error is not None
    assert "logits that are not finite" in error
    assert step <= faults.faulty_call + 1
    assert "logits that are not finite" in caplog.text
    assert run.tokens.pop(failing) == expected[failing][:at]
    assert run.tokens == {key: tokens for key, tokens in expected.items() if key != failing}
    assert {finish for finish, _, _ in run.ends.values()} <= {"length", "stop"}
    assert 0 <= min(faults.fed) <= max(faults.fed) < VOCAB_SIZE
    failed = [stats.rows_failed for stats in run.stats if stats.rows_failed]
    assert failed == [{"nonfinite_logits": 1}]
    assert run.core.idle


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_single_infinite_logits_are_no_fault(path: str) -> None:
    """A model may rule out tokens by -inf; a grammar that allows only these is an error."""
    run = Run(path)
    forward = run.core.pipeline.forward
    ruled_out = mx.arange(VOCAB_SIZE) >= 100

    def with_ruled_out(*given: Any) -> Any:
        outcome = forward(*given)
        logits = None if outcome.logits is None else mx.where(ruled_out, -mx.inf, outcome.logits)
        return outcome._replace(logits=logits)

    run.core.pipeline.forward = with_ruled_out  # type: ignore[assignment]
    # The tokens of ASCII letters are below 100, those of "é" are not.
    run.submit("letters", BAD, temperature=1.0, grammar=Grammar("regex", "[a-c]{9}"), logprobs=20)
    run.submit("none", BAD, temperature=1.0, grammar=Grammar("regex", "ab\u00e9"), min_p=0.5)
    run.submit("sampled", [5, 6], **SAMPLED)
    run.drain()
    assert run.ends["letters", 0][0] == "stop"
    assert run.ends["sampled", 0][0] == "length"
    assert max(run.tokens["sampled", 0]) < 100
    finish, error, _ = run.ends["none", 0]
    assert (finish, len(run.tokens["none", 0])) == ("error", 2)
    assert "no token may come next" in str(error)
    assert [stats.rows_failed for stats in run.stats if stats.rows_failed] == [{"no_choice": 1}]


@pytest.mark.parametrize("path", PATHS)
def test_a_stop_token_is_chosen_if_a_grammar_allows_nothing_else(path: str) -> None:
    """Even before min_tokens, since the text is complete."""
    run = Run(path)
    for name, temperature in (("greedy", 0.0), ("cold", 1e-40), ("hot", 2.0)):
        run.submit(
            name,
            BAD,
            temperature=temperature,
            top_p=0.9,
            grammar=Grammar("regex", "x{2,3}"),
            min_tokens=20,
            stop_token_ids=(0, 2),
        )
    run.drain()
    assert {finish for finish, _, _ in run.ends.values()} == {"stop"}
    assert all(2 <= len(tokens) <= 4 for tokens in run.tokens.values())


def test_an_invalid_token_from_the_device_fails_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("packed")
    sample = run.core.batch.sample

    def outside(*given: Any) -> Any:
        sampled = sample(*given)
        rows = [s.request_id for s in run.core.batch.rows]
        outcomes = [VOCAB_SIZE if name == "bad" else 5 for name in rows]
        return type(sampled)(sampled.tokens, mx.array(outcomes), sampled.logprobs)

    monkeypatch.setattr(run.core.batch, "sample", outside)
    run.submit("bad", BAD)
    run.submit("good", BAD)
    run.drain()
    assert run.ends["bad", 0][0] == "error"
    assert run.tokens["bad", 0] == []
    assert run.ends["good", 0][0] == "length"
    assert [s.rows_failed for s in run.stats if s.rows_failed] == [{"bad_token": 1}]
