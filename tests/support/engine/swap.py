"""Models with each kind of cache, and engines whose memory is too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from conformance.weights import tiny_model as conformance_model
from support.engine.bench import Bench
from support.engine.llama4 import tiny_llama4
from support.tiny import tiny_model

from chairlift.cache.capacity import Capacity
from chairlift.cache.quantized import HalfPrecision, Quantization, Storage
from chairlift.scheduler.sequence import Sequence
from chairlift.scheduler.step_memory.capacity_planner import CapacityPlanner


class Kind(NamedTuple):
    """A model, and how its keys and values are stored."""

    make: Callable[[], Any]
    quantization: Storage | None = None


def _quantized_llama4() -> Any:
    return tiny_llama4(head_dim=32, interleave_moe_layer_step=9)


KINDS = {
    "full": Kind(lambda: tiny_model("llama", seed=2)),
    "window": Kind(lambda: tiny_model("gemma3", seed=2)),
    "state": Kind(lambda: tiny_model("lfm2", seed=2)),
    "chunked": Kind(tiny_llama4),
    "quantized": Kind(_quantized_llama4, quantization=Quantization(8, 32)),
    "half": Kind(lambda: tiny_model("llama", seed=2), HalfPrecision()),
    "cache lists": Kind(lambda: conformance_model("falcon_h1")),
}


# With quantized KV, rounding may decide between two greedy tokens whose logprobs are this close,
# with or without a preemption.
TIE = 0.1


def squeeze(bench: Bench, max_rows: int) -> None:
    """Runs a step with memory for at most ``max_rows`` rows."""
    original = CapacityPlanner.capacities

    def capacities(
        planner: CapacityPlanner, more: Sequence | None = None, prompt_bytes: int = 0
    ) -> tuple[Capacity, ...] | None:
        full = planner.rows + (more.rows if more else 0) > max_rows
        return None if full else original(planner, more, prompt_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapacityPlanner, "capacities", capacities)
        bench.step()


def assert_same(got: Bench, expected: Bench) -> None:
    assert got.outputs.keys() == expected.outputs.keys()
    compared, packed = 0, isinstance(got.quantization, Quantization)
    for name, index in expected.outputs:
        pairs = zip(got.outputs[name, index], expected.outputs[name, index], strict=True)
        for at, (ours, theirs) in enumerate(pairs):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            [one], [other] = ours.logprobs, theirs.logprobs
            if packed and other.top[0][1] - other.top[1][1] < TIE:
                break
            assert ours.token_ids == theirs.token_ids, (name, at)
            compared += 1
            assert ours.finish == theirs.finish
            close = TIE / 2 if packed else 1e-3
            assert one.logprob == pytest.approx(other.logprob, abs=close)
    assert compared > 50
