"""Kinds of caches, and engines whose memory is too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from conformance.weights import tiny_model as conformance_model
from support.engine.bench import Bench
from support.engine.llama4 import _llama4
from support.tiny import tiny_model

from chairlift.cache.capacity import Capacity
from chairlift.cache.quantized import Quantization
from chairlift.scheduler.capacity_planner import CapacityPlanner
from chairlift.scheduler.sequence import Sequence


class Kind(NamedTuple):
    """A model, and how its keys and values are quantized."""

    make: Callable[[], Any]
    quantization: Quantization | None = None


def _quantized_llama4() -> Any:
    return _llama4(head_dim=32, interleave_moe_layer_step=9)


KINDS = {
    "full": Kind(lambda: tiny_model("llama", seed=2)),
    "window": Kind(lambda: tiny_model("gemma3", seed=2)),
    "state": Kind(lambda: tiny_model("lfm2", seed=2)),
    "chunked": Kind(_llama4),
    "quantized": Kind(_quantized_llama4, quantization=Quantization(8, 32)),
    "cache lists": Kind(lambda: conformance_model("falcon_h1")),
}


# Where KV is quantized, rounding makes codes jump, and decides between greedy tokens this close,
# preempted or not.
TIE = 0.1


def squeeze(bench: Bench, most: int) -> None:
    """A step for which there is memory for so many rows only."""
    fitting = CapacityPlanner.capacities

    def capacities(
        room: CapacityPlanner, more: Sequence | None = None, prompt_bytes: int = 0
    ) -> tuple[Capacity, ...] | None:
        full = room.rows + (more.rows if more else 0) > most
        return None if full else fitting(room, more, prompt_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CapacityPlanner, "capacities", capacities)
        bench.step()


def assert_same(got: Bench, expected: Bench) -> None:
    assert got.outputs.keys() == expected.outputs.keys()
    compared = 0
    for name, index in expected.outputs:
        pairs = zip(got.outputs[name, index], expected.outputs[name, index], strict=True)
        for at, (ours, theirs) in enumerate(pairs):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            [one], [other] = ours.logprobs, theirs.logprobs
            if got.quantization and other.top[0][1] - other.top[1][1] < TIE:
                break
            assert ours.token_ids == theirs.token_ids, (name, at)
            compared += 1
            assert ours.finish == theirs.finish
            close = TIE / 2 if got.quantization else 1e-3
            assert one.logprob == pytest.approx(other.logprob, abs=close)
    assert compared > 100
