"""Each draft is counted once: in its choice's outputs, and in the statistics of a step."""

from __future__ import annotations

import random
from typing import Any

from support.engine.bench import Bench
from support.engine.drafts import oracles, verify_any
from support.tiny import tiny_model

from chairlift.engine.cpu import kernels
from chairlift.engine.messages import SamplingParams, StepStats, Submit

DRAFT = 4
PROMPTS = {name: [5 + number, 9, 12] * 3 for number, name in enumerate("abc")}


def eager_model() -> Any:
    model = tiny_model("llama", seed=6)
    kernels.install(model)
    return model


def drafting(model: Any, wrong: float, **params: Any) -> Bench:
    """A bench whose requests PROMPTS get drafts that are wrong with this probability a token."""
    plain = Bench(model, eager=True)
    for name, prompt in PROMPTS.items():
        plain.submit(name, prompt, count=20, n=2)
    plain.drain()
    right = {name: [plain.tokens(name, index) for index in range(2)] for name in PROMPTS}
    bench = Bench(model, eager=True, draft=DRAFT, propose=oracles(right, wrong), **params)
    verify_any(bench.core)
    return bench


def total(stats: list[StepStats], field: str) -> int:
    return sum(getattr(step, field) for step in stats)


def test_outputs_and_statistics_count_the_same_drafts() -> None:
    bench = drafting(eager_model(), 0.3)
    for name, prompt in PROMPTS.items():
        bench.submit(name, prompt, count=20, n=2)
    bench.drain()
    outputs = [output for each in bench.outputs.values() for output in each]
    accepted = sum(output.accepted for output in outputs)
    rejected = sum(output.rejected for output in outputs)
    assert accepted
    assert rejected
    assert all(output.accepted <= len(output.token_ids) for output in outputs)
    # Of several tokens all are from a draft, except the one that follows it.
    assert all(len(output.token_ids) - output.accepted in (0, 1) for output in outputs)
    assert accepted == sum(sum(step.accepted_tokens) for step in bench.stats)
    assert accepted + rejected == total(bench.stats, "draft_tokens")
    assert all(len(step.accepted_tokens) == step.drafts for step in bench.stats)
    tokens = sum(len(output.token_ids) for output in outputs)
    assert tokens == total(bench.stats, "output_tokens") == len(PROMPTS) * 2 * 20
    # The first token of a request is its prompt's.
    assert total(bench.stats, "ended_tokens") >= tokens - 2 * len(PROMPTS)
    assert total(bench.stats, "ended_rows") < total(bench.stats, "ended_tokens")


def test_a_draft_is_right_only_as_far_as_the_output_goes() -> None:
    bench = drafting(eager_model(), 0.0)
    bench.submit("a", PROMPTS["a"], count=20, n=2)
    bench.drain()
    stop = bench.tokens("a")[10]
    stopped = drafting(eager_model(), 0.0)
    stopped.submit("a", PROMPTS["a"], count=20, n=2, stop_token_ids=(stop,))
    stopped.drain()
    for index in range(2):
        outputs = stopped.outputs["a", index]
        assert outputs[-1].finish == "stop"
        assert sum(output.accepted for output in outputs) < len(stopped.tokens("a", index))
    proposed = sum(o.accepted + o.rejected for each in stopped.outputs.values() for o in each)
    assert proposed == total(stopped.stats, "draft_tokens")


def test_a_prompt_without_output_ends_in_a_step_with_drafts() -> None:
    bench = drafting(eager_model(), 0.0)
    bench.submit("a", PROMPTS["a"], count=20, n=2)
    random_ = random.Random(0)
    number = 0
    while not bench.core.idle:
        if number < 8:
            prompt = [random_.randrange(3, 60) for _ in range(9)]
            bench.submit(f"prompt {number}", prompt, count=0, reading={"prompt_logprobs": 1})
            number += 1
        bench.step()
    assert total(bench.stats, "drafts")
    for i in range(number):
        [output] = bench.outputs[f"prompt {i}", 0]
        assert (output.finish, output.error, output.token_ids) == ("length", None, [])


def test_drafts_of_the_canarys_replays_are_not_counted() -> None:
    bench = drafting(eager_model(), 0.3)
    params = SamplingParams(max_tokens=20, seed=1, temperature=0.0)
    bench.core.submit(Submit("a", PROMPTS["a"], params, replay=True))
    bench.drain()
    assert sum(output.accepted for output in bench.outputs["a", 0])
    empty = StepStats()
    for field in ("drafts", "draft_tokens", "accepted_tokens", "output_tokens"):
        assert all(getattr(step, field) == getattr(empty, field) for step in bench.stats)
