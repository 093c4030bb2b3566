"""Prompt log-probabilities and embeddings equal mlx-lm's, whatever else runs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engine.bench import Bench
from support.engine.reference import solo_hidden, solo_logprobs, solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.messages import Resumed, SamplingParams, Submit, TokenOutput
from chairlift.engine.model.trials.probe import probe
from chairlift.scheduler.cost import CostModel, Work

TOLERANCE = 1e-4
TOP = 3


def _prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    random_ = random.Random(seed)
    return [[random_.randrange(3, 250) for _ in range(length)] for length in lengths]


def _assert_scored(model: Any, prompt: list[int], output: TokenOutput, top: int = TOP) -> None:
    assert output.prompt_logprobs is not None
    scores = list(output.prompt_logprobs)
    assert len(scores) == len(prompt) - 1
    if not scores:
        return
    expected = np.array(solo_logprobs(model, prompt))
    chosen = expected[np.arange(len(scores)), prompt[1:]]
    assert np.allclose([score.logprob for score in scores], chosen, atol=TOLERANCE)
    for position, score in zip(expected, scores, strict=True):
        assert len(score.top) == top
        likely = np.sort(position)[::-1][:top]
        assert np.allclose([value for _, value in score.top], likely, atol=TOLERANCE)
        assert np.allclose(position[[token for token, _ in score.top]], likely, atol=TOLERANCE)


def _assert_pooled(model: Any, prompt: list[int], output: TokenOutput, pooling: str) -> None:
    assert output.embedding is not None
    hidden = np.array(solo_hidden(model, prompt))
    expected = hidden.mean(axis=0) if pooling == "mean" else hidden[-1]
    assert np.allclose(np.frombuffer(output.embedding, np.float32), expected, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_prompt_outputs_beside_rows_and_each_other(kind: TinyKind) -> None:
    """Prompts take several chunks.

    In the second run, the prefix cache contains every prompt; only "last" pooling can use it.
    """
    model = tiny_model(kind, seed=4)
    prompts = _prompts(4, [1, 9, 70, 110])
    bench = Bench(model, tokens=48, prefix=1 << 24, max_scored=20)
    bench.submit("row", prompts[2][:5], 60)
    for run in ("one", "two"):
        for i, prompt in enumerate(prompts):
            bench.submit(f"{run} scored {i}", prompt, 0, reading={"prompt_logprobs": TOP})
            bench.submit(f"{run} followed {i}", prompt, 4, reading={"prompt_logprobs": 0})
            for pooling in ("mean", "last"):
                bench.submit(f"{run} {pooling} {i}", prompt, 0, reading={"pooling": pooling})
            bench.step()
        bench.drain()
    row = bench.tokens("row")
    assert row == solo_tokens(model, prompts[2][:5], 60, row)
    for run in ("one", "two"):
        for i, prompt in enumerate(prompts):
            [scored] = bench.outputs[f"{run} scored {i}", 0]
            assert (scored.token_ids, scored.finish) == ([], "length")
            assert scored.prefill_times is not None
            assert sum(tokens for _, tokens in scored.prefill_times.chunks) == len(prompt)
            _assert_scored(model, prompt, scored)
            first, *others = bench.outputs[f"{run} followed {i}", 0]
            _assert_scored(model, prompt, first, top=0)
            assert all(output.prompt_logprobs is None for output in others)
            assert bench.tokens(f"{run} followed {i}") == solo_tokens(model, prompt, 4)
            for pooling in ("mean", "last"):
                [pooled] = bench.outputs[f"{run} {pooling} {i}", 0]
                _assert_pooled(model, prompt, pooled, pooling)
                expects_hit = pooling == "last" and run == "two" and len(prompt) > 64
                assert bool(pooled.cached_tokens) >= expects_hit
                assert not (pooled.cached_tokens and pooling == "mean")
    assert max(stats.prefill_tokens for stats in bench.stats) > 20
    assert {choice.generated_tokens for choice in bench.finished} == {0, 4, 60}


@pytest.mark.slow
@pytest.mark.parametrize("swap", [0, 1 << 20])
def test_preempted_prompts_have_the_same_outputs(swap: int) -> None:
    """Rows with a better priority preempt a prompt during its prefill."""
    model = tiny_model("llama", seed=2)
    geometry = probe(model, "test").geometry
    bench = Bench(model, kv=500 * geometry.bytes_per_token, rows=4, tokens=5, swap=swap)
    prompts = _prompts(2, [170, 165, 160])
    readings = ({"prompt_logprobs": TOP}, {"pooling": "mean"}, {"pooling": "last"})
    for i, (prompt, reading) in enumerate(zip(prompts, readings, strict=True)):
        bench.submit(str(i), prompt, 0, reading={**reading, "priority": 1})
        bench.step()
        for row in range(3):
            bench.submit(f"row {i} {row}", [5, 6, 7 + row], 90)
        bench.drain()
    resumed = Counter()
    for stats in bench.stats:
        resumed.update(stats.resumed)
    assert resumed["memory" if swap else "recompute"] >= 3
    _assert_scored(model, prompts[0], bench.outputs["0", 0][0])
    _assert_pooled(model, prompts[1], bench.outputs["1", 0][0], "mean")
    _assert_pooled(model, prompts[2], bench.outputs["2", 0][0], "last")
    row = bench.tokens("row 1 1")
    assert row == solo_tokens(model, [5, 6, 8], 90, row)
    assert not bench.core.prompt_outputs._by_sequence
    assert not bench.core.prefill.nbytes


def test_each_choice_gets_its_prompt_outputs_once_even_after_a_restart() -> None:
    """A resumed choice with tokens has got them before; one without tokens has not."""
    model = tiny_model("llama", seed=2)
    [prompt] = _prompts(5, [30])
    bench = Bench(model)
    bench.submit("both", prompt, 3, n=2, reading={"prompt_logprobs": TOP})
    bench.core.submit(
        Submit(
            "resumed",
            prompt,
            SamplingParams(max_tokens=3, seed=1, temperature=0.0),
            n=2,
            resumed=(Resumed(0, solo_tokens(model, prompt, 1), first_token=1.0), Resumed(1, [])),
            prompt_logprobs=TOP,
        )
    )
    bench.submit("none", prompt, 0, n=2, reading={"prompt_logprobs": TOP})
    bench.drain()
    for index in (0, 1):
        _assert_scored(model, prompt, bench.outputs["both", index][0])
        [alone] = bench.outputs["none", index]
        _assert_scored(model, prompt, alone)
    assert [output.prompt_logprobs for output in bench.outputs["resumed", 0]] == [None, None]
    _assert_scored(model, prompt, bench.outputs["resumed", 1][0])


def test_choices_without_tokens_have_a_scheduling_time() -> None:
    """Even if the prompt is a single chunk."""
    bench = Bench(tiny_model("llama"))
    bench.submit("both", _prompts(5, [30])[0], 0, n=2, reading={"prompt_logprobs": 0})
    bench.drain()
    assert all(choice.scheduled is not None for choice in bench.finished)
    assert len(bench.finished) == 2


def test_nonfinite_hidden_states_fail_their_request_alone() -> None:
    model = tiny_model("llama", seed=2)
    one, two = _prompts(6, [8, 11])
    bench = Bench(model)
    weight = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.where(mx.arange(259)[:, None] == one[0], mx.nan, weight)
    bench.submit("broken", one, 0, reading={"pooling": "mean"})
    bench.submit("whole", two, 0, reading={"pooling": "mean"})
    bench.drain()
    [broken] = bench.outputs["broken", 0]
    assert broken.finish == "error"
    assert "not finite" in str(broken.error)
    model.model.embed_tokens.weight = weight
    _assert_pooled(model, two, bench.outputs["whole", 0][0], "mean")


def test_nonfinite_logits_of_a_prompt_fail_their_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With and without generated tokens; single tokens ruled out by -inf are no fault."""
    model = tiny_model("llama", seed=2)
    one, two = _prompts(6, [8, 11])
    bench = Bench(model)
    forward = bench.core.pipeline.forward
    spoils: list[float] = [-mx.inf]

    def spoiled(*given: Any) -> Any:
        outcome = forward(*given)
        places = [chunk.tokens[0] == one[0] for chunk in given[2]]
        scored = {
            number: mx.where(mx.arange(part.shape[1]) == one[1], spoils[0], part)
            if places[number]
            else part
            for number, part in outcome.scored.items()
        }
        return outcome._replace(scored=scored)

    monkeypatch.setattr(bench.core.pipeline, "forward", spoiled)
    bench.submit("ruled out", one, 0, reading={"prompt_logprobs": TOP})
    bench.drain()
    [output] = bench.outputs["ruled out", 0]
    assert output.prompt_logprobs is not None
    assert next(iter(output.prompt_logprobs)).logprob == -mx.inf
    for number, spoils[0] in enumerate((mx.nan, mx.inf)):
        for count in (0, 3):
            name = f"{number} {count}"
            bench.submit(f"broken {name}", one, count, reading={"prompt_logprobs": TOP})
            bench.submit(f"whole {name}", two, count, reading={"prompt_logprobs": TOP})
            bench.drain()
            broken = bench.outputs[f"broken {name}", 0][-1]
            assert broken.finish == "error"
            assert "not finite" in str(broken.error)
            _assert_scored(model, two, bench.outputs[f"whole {name}", 0][0])
    assert sum(stats.rows_failed.get("nonfinite_logits", 0) for stats in bench.stats) == 4


def test_a_step_bounds_the_scored_tokens() -> None:
    """By ``max_scored``, and by time once the cost of logits has been learned."""
    costs = CostModel()
    for tokens in range(32, 512, 32):
        for scored in (False, True):
            work = Work(4, 400).with_chunk(0, tokens, scored)
            costs.learn(work, 0.01 + 1e-4 * tokens + 3e-4 * work.scored)
    free = costs.tokens_within(Work(4, 400), 0.05, 0)
    assert free == pytest.approx(400, rel=0.1)
    assert costs.tokens_within(Work(4, 400), 0.05, 0, scored=True) == pytest.approx(100, rel=0.1)
    bench = Bench(tiny_model("llama"), tokens=64, max_scored=16)
    bench.submit("scored", _prompts(1, [80])[0], 0, reading={"prompt_logprobs": 0})
    bench.submit("not", _prompts(2, [80])[0], 0, reading={"pooling": "last"})
    bench.drain()
    assert [tokens for _, tokens in bench.outputs["scored", 0][0].prefill_times.chunks] == [16] * 5
    assert [tokens for _, tokens in bench.outputs["not", 0][0].prefill_times.chunks] == [48, 32]
