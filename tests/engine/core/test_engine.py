"""The engine on real architectures: batched tokens equal the solo tokens."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.engine.bench import Bench
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.step import Part
from chairlift.cache.ring import Ring
from chairlift.engine.core.warm import warm
from chairlift.engine.cpu import activations, kernels
from chairlift.engine.cpu.attention import blocks as attention
from chairlift.engine.messages import Abort
from chairlift.engine.model.trials.probe import probe


def _prompts(seed: int, count: int, longest: int = 120) -> list[list[int]]:
    random_ = random.Random(seed)
    return [
        [random_.randrange(3, 250) for _ in range(random_.choice([1, 2, 7, 30, longest]))]
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_batched_tokens_are_the_solo_tokens(kind: TinyKind) -> None:
    """Requests arrive while others run; prompts take several chunks, and some leave early."""
    model = tiny_model(kind, seed=5)
    prompts = _prompts(5, 14)
    counts = [random.Random(i).randrange(1, 40) for i in range(14)]
    bench = Bench(model)
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        bench.submit(str(i), prompt, count)
        for _ in range(i % 4):
            bench.step()
        if i % 5 == 4:
            bench.submit(f"leaves {i}", prompt, 50)
            bench.step()
            bench.core.abort(Abort(f"leaves {i}"))
    bench.drain()
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        tokens = bench.tokens(str(i))
        assert tokens == solo_tokens(model, prompt, count, tokens)
    assert all(bench.outputs[str(i), 0][-1].finish == "length" for i in range(14))


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_preemption_changes_no_tokens() -> None:
    model = tiny_model("gemma3", seed=2)
    prompts = _prompts(2, 6, longest=15)
    geometry = probe(model, "test").geometry
    # Memory for the longest alone, not for all of them together.
    bench = Bench(model, kv=136 * geometry.bytes_per_token)
    for i, prompt in enumerate(prompts):
        bench.submit(str(i), prompt, 60)
    bench.drain()
    assert sum(stats.preemptions for stats in bench.stats) > 0
    for i, prompt in enumerate(prompts):
        tokens = bench.tokens(str(i))
        assert tokens == solo_tokens(model, prompt, 60, tokens)
    assert all(stats.kv_reserved_bytes <= stats.kv_limit_bytes for stats in bench.stats)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_the_longest_admitted_sequence_fits_in_memory(kind: TinyKind) -> None:
    model = tiny_model(kind, seed=2)
    geometry = probe(model, "test").geometry
    bench = Bench(model, kv=100 * geometry.bytes_per_token + 4 * geometry.row_bytes)
    longest = bench.core.limits.max_context
    assert longest > 30
    for name, prompt in (("short", 5), ("long", longest - 4)):
        tokens = _prompts(1, 1)[0] * prompt
        bench.submit(name, tokens[:prompt], longest - prompt)
        bench.drain()
        got = bench.tokens(name)
        assert got == solo_tokens(model, tokens[:prompt], longest - prompt, got)
    assert not any(stats.preemptions for stats in bench.stats)
    assert all(stats.kv_reserved_bytes <= stats.kv_limit_bytes for stats in bench.stats)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_a_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    model = tiny_model("llama", seed=1)

    def run(others: int, kv: int = 1 << 30) -> tuple[list[int], int]:
        bench = Bench(model, kv=kv)
        for i in range(others):
            bench.submit(f"o{i}", [5 + i] * (4 + i), 40, seed=70 + i, temperature=1.2)
            bench.step()
        bench.submit("mine", [9, 8, 7, 6], 40, temperature=1.0, top_p=0.95, presence_penalty=0.5)
        bench.drain()
        return bench.tokens("mine"), sum(stats.preemptions for stats in bench.stats)

    alone, _ = run(0)
    assert run(5)[0] == alone
    geometry = probe(model, "test").geometry
    interrupted, preemptions = run(5, kv=120 * geometry.bytes_per_token)
    assert preemptions > 0
    assert interrupted == alone, "a preempted row continues with the same tokens"


def test_choices_share_a_prefill_and_differ_by_seed() -> None:
    model = tiny_model("qwen3", seed=1)
    bench = Bench(model)
    bench.submit("n", list(range(5, 35)), 12, n=3, temperature=1.0, seed=40)
    bench.submit("third", list(range(5, 35)), 12, temperature=1.0, seed=42)
    bench.drain()
    choices = [bench.tokens("n", index) for index in range(3)]
    assert choices[2] == bench.tokens("third")
    assert len({tuple(choice) for choice in choices}) == 3
    assert sum(stats.prefill_tokens for stats in bench.stats) == 30 + 30
    assert [choice.n for choice in bench.finished].count(3) == 3


@pytest.mark.parametrize("rows", [4, 2])
def test_choices_report_the_chunks_of_their_prefill(rows: int) -> None:
    """That is one for all choices if there are rows for them, and else one for each."""
    bench = Bench(tiny_model("llama"), rows=rows)
    bench.submit("n", list(range(5, 80)), 3, n=3)
    bench.drain()
    for index in range(3):
        times = bench.outputs["n", index][0].prefill_times
        assert times is not None
        assert sum(tokens for _, tokens in times.chunks) == 75


def test_a_stop_token_ends_a_row_and_min_tokens_delays_it() -> None:
    model = tiny_model("llama", seed=4)
    prompt = [11, 12, 13]
    greedy = solo_tokens(model, prompt, 20)
    stop = next(token for i, token in enumerate(greedy) if i >= 3 and token not in greedy[:i])
    at = greedy.index(stop)
    bench = Bench(model)
    bench.submit("stops", prompt, 20, stop_token_ids=(stop,))
    bench.submit("delayed", prompt, 20, stop_token_ids=(stop,), min_tokens=at + 1)
    bench.drain()
    last = bench.outputs["stops", 0][-1]
    assert bench.tokens("stops") == greedy[: at + 1]
    assert (last.finish, last.ended_by_token) == ("stop", True)
    assert bench.tokens("delayed")[:at] == greedy[:at]
    assert bench.tokens("delayed")[at] != stop


def test_an_aborted_row_leaves_with_the_next_step() -> None:
    bench = Bench(tiny_model("llama"))
    bench.submit("goes", [5, 6, 7], 1000)
    bench.submit("stays", [5, 6, 8], 30)
    for _ in range(4):
        bench.step()
    assert bench.stats[-1].rows == 2
    bench.core.abort(Abort("goes"))
    bench.step()
    assert bench.stats[-1].rows == 1
    bench.submit("queued", [5], 10, n=2)
    bench.core.abort(Abort("queued"))
    bench.drain()
    assert [c.reason for c in bench.finished] == ["abort", "abort", "abort", "length"]
    assert "queued" not in bench.core.requests
    assert bench.core.batch.nbytes == 0, "an empty batch holds no memory"


def test_a_chunk_whose_request_is_gone_is_read_before_the_engine_idles() -> None:
    """Else the time in which the engine idles would count as the chunk's.

    Neither the aborted replay nor the withdrawn request is reported to the metrics.
    """
    bench = Bench(tiny_model("llama"))
    bench.submit("replay", [5] * 200, reading={"replay": True})
    bench.step()
    bench.core.abort(Abort("replay"))
    bench.drain()
    bench.submit("withdrawn", [5] * 200)
    bench.step()
    bench.core.withdraw("withdrawn")
    bench.drain()
    assert bench.core.prefill.nbytes == 0
    assert sum(s.ended_prefill_tokens for s in bench.stats) == 2 * 40


def test_logprobs_are_the_models_at_every_position() -> None:
    model = tiny_model("llama", seed=8)
    bench = Bench(model)
    prompt = [21, 22, 23, 24]
    bench.submit("with", prompt, 6, logprobs=4)
    bench.submit("without", [9] * 20, 6)
    bench.submit("fewer", prompt, 6, logprobs=1)
    bench.drain()
    tokens = bench.tokens("with")
    logits = model(mx.array([prompt + tokens]))[0, len(prompt) - 1 : -1]
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for i, output in enumerate(bench.outputs["with", 0]):
        assert output.logprobs is not None
        assert output.logprobs[0].logprob == pytest.approx(expected[i, tokens[i]].item(), abs=1e-4)
        top = output.logprobs[0].top
        assert [token for token, _ in top] == mx.argsort(-expected[i])[:4].tolist()
    assert all(output.logprobs is None for output in bench.outputs["without", 0])
    fewer = bench.outputs["fewer", 0][0].logprobs
    assert fewer is not None
    assert len(fewer[0].top) == 1


def test_statistics_match_the_work() -> None:
    bench = Bench(tiny_model("llama"))
    began = time.monotonic()
    bench.submit("a", list(range(3, 103)), 10)
    bench.submit("b", list(range(3, 13)), 4)
    bench.drain()
    steps = bench.stats
    assert sum(s.prefill_tokens for s in steps) == 110
    assert sum(s.prefill_tokens + s.decode_tokens for s in steps) == 110 + (10 - 1) + (4 - 1)
    assert sum(len(s.first_token_latencies) for s in steps) == 2
    assert sum(len(s.inter_token_latencies) for s in steps) == 9 + 3
    assert sum(s.ended_prefill_tokens for s in steps) == 110
    assert sum(s.ended_rows for s in steps) == (10 - 1) + (4 - 1)
    assert all((s.ended_seconds > 0) == (s.ended_prefill_tokens + s.ended_rows > 0) for s in steps)
    assert 0 < sum(s.ended_seconds for s in steps) <= time.monotonic() - began
    assert max(s.rows for s in steps) == 2
    assert steps[0].waiting == 1
    assert all(0 <= s.padded_columns <= s.total_columns for s in steps)
    assert all(s.kv_used_bytes <= s.kv_reserved_bytes <= s.kv_limit_bytes for s in steps)
    assert {c.generated_tokens for c in bench.finished} == {10, 4}
    for choice in bench.finished:
        assert choice.scheduled is not None
        assert choice.first_token is not None
        assert choice.arrival <= choice.scheduled <= choice.first_token <= choice.finished


def test_waiting_for_a_step_does_not_run_the_next() -> None:
    """The engine waits on copies of array handles, since a chunk updates its buffers in place."""
    bench = Bench(tiny_model("llama"), tokens=40)
    bench.submit("long", list(range(3, 200)), 2)
    for _ in range(3):
        bench.step()
        buffers = [array for cache in bench.core.prefill._caches.values() for array in cache.state]
        assert buffers
        assert not set(map(id, buffers)) & set(map(id, bench.core.pipeline.running.side_effects))
    bench.drain()


def test_shared_rotary_tables_equal_mlxs_rope() -> None:
    mx.random.seed(0)
    theirs = nn.RoPE(12, base=5000.0, scale=0.5)
    tables: dict[str, Any] = {}
    one, two = kernels.SharedRope(theirs, tables), kernels.SharedRope(theirs, tables)
    for offset in (mx.array([0, 700, 31]), mx.array([1, 701, 32]), 3, 70_000):
        for length in (1, 4):
            x = mx.random.normal((3, 2, length, 16))
            for ours in (one, two):
                assert mx.allclose(ours(x, offset=offset), theirs(x, offset=offset), atol=1e-4)
    assert one(x.astype(mx.bfloat16)).dtype == mx.bfloat16


@pytest.mark.parametrize("block", [64, 1 << 17])
def test_the_fast_cpu_functions_equal_mlxs(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    mx.random.seed(0)
    gate, x = mx.random.normal((4, 50)) * 10, mx.random.normal((4, 50))
    gate[0, 0] = -1e4
    expected = gate * mx.sigmoid(gate) * x
    assert mx.allclose(activations.swiglu(gate, x), expected, rtol=1e-5, atol=1e-6)
    for rows, length, size in itertools.product((1, 2), (1, 5), (1, 200)):
        queries = mx.random.normal((rows, 6, length, 16)) * size  # scores of a few, or hundreds
        buffers = mx.random.normal((rows, 2, 12, 16)), mx.random.normal((rows, 2, 12, 12))
        keys, values = [buffer[:, :, 2:11] for buffer in buffers]
        hidden = mx.random.uniform(shape=(rows, 1, length, 9)) < 0.7
        hidden[:, :, :, 4] = True
        for mask in (None, "causal", hidden, hidden[:1, :1]):
            theirs = mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=0.3, mask=mask
            )
            part = Part(LayerCache(Ring()), queries, keys, values, mask)
            [ours] = attention.attend([part], 0.3, None)
            assert ours is not None
            assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_warming_runs_every_kind_of_step_and_leaves_the_engine_idle() -> None:
    bench = Bench(tiny_model("qwen3"))
    sampled: list[int] = []
    masked: list[bool] = []
    sample = bench.core.batch.sample

    def watched(logits: mx.array, drafts: Any = (), masks: Any = None) -> Any:
        sampled.append(logits.shape[0])
        masked.append(masks is not None)
        return sample(logits, drafts, masks)

    bench.core.batch.sample = watched  # type: ignore[method-assign]
    warm(bench.core, kernels=True)
    assert bench.core.idle
    assert {1, 2} <= set(sampled), "a single row and several"
    assert {False, True} == set(masked), "with and without a grammar"


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("requests", [1, 3])
def test_an_eager_model_s_tokens_do_not_wait_for_the_next_step(eager: bool, requests: int) -> None:
    """Elsewhere the next step is launched first, because the device would wait for the host."""
    bench = Bench(tiny_model("llama"), eager=eager)
    for number in range(requests):
        bench.submit(str(number), [1, 2, 3 + number], 4)
    returned: list[int] = []
    while not bench.core.idle:
        before = sum(map(len, bench.outputs.values()))
        bench.step()
        returned.append(sum(map(len, bench.outputs.values())) - before)
    assert returned == [0] * (not eager) + [requests] * 4 + [0] * eager, "rows leave afterwards"
    assert not bench.core.pipeline.running.computed
