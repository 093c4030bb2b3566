"""Machines to simulate: the time of a step and the limits of the engine on each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from chairlift.cache.capacity import KVGeometry
from chairlift.scheduler.cost import Work
from chairlift.scheduler.limits import Limits


@dataclass(frozen=True, slots=True)
class StepCost:
    """A linear model of a step's time, in seconds.

    Attributes:
        step: the constant part of each step.
        row: per row.
        context: per token of context that rows attend to.
        token: per prompt token.
        pair: per pair of a prompt token and a token that it attends to.
        prompt: per prompt.
    """

    step: float
    row: float
    context: float
    token: float
    pair: float
    prompt: float = 0.0

    def seconds(self, work: Work) -> float:
        """Seconds of a step with this work."""
        return (
            self.step
            + self.row * work.rows
            + self.context * work.context
            + self.token * work.tokens
            + self.pair * work.pairs
            + self.prompt * work.prompts
        )

    def seconds_alone(self, prompt: int, output: int, chunk: int) -> float:
        """Seconds of a request that has the machine to itself.

        Args:
            prompt: prompt tokens.
            output: output tokens.
            chunk: prompt tokens of a step.
        """
        prompt_work = Work().with_chunk(0, prompt)
        prefill = self.seconds(prompt_work) + (self.step + self.prompt) * ((prompt - 1) // chunk)
        steps = output - 1
        context = steps * prompt + steps * output // 2
        return prefill + steps * (self.step + self.row) + self.context * context


@dataclass(frozen=True, slots=True)
class Machine:
    """The cost of steps on a machine with a certain model, and the engine's limits there."""

    cost: StepCost
    limits: Limits


def factors(noise: float, seed: int) -> Iterator[float]:
    """Yields random factors for step times, uniform in 1 ± ``noise``, without end.

    Raises:
        ValueError: ``noise`` is negative, or 1 or more.
    """
    if not 0 <= noise < 1:
        raise ValueError(f"noise must be at least 0 and below 1, not {noise:g}")
    rng = random.Random(seed)
    return (rng.uniform(1 - noise, 1 + noise) for _ in repeat(None))


def _layers(count: int, size: int) -> KVGeometry:
    """The geometry of ``count`` full-attention layers with ``size`` bytes a token in each."""
    return KVGeometry(count * size, layer_bytes={None: size})


# The costs are fitted by hand to docs/explanation/performance.md; the limits are the engine's.
MACHINES = {
    # Qwen3-8B in bfloat16: 36 layers, 8 key heads of 128. Steps of 1, 64 and 256 rows at a context
    # of 512 take 5.0, 7.1 and 14.2 ms, 385 and 1,134 prompt tokens beside 128 and 139 rows 18.5 and
    # 35.5 ms. The cost of a pair is computed: 4 * 4096 operations a layer at 400 TFLOP/s.
    "h200-qwen3-8b": Machine(
        StepCost(step=5.1e-3, row=16e-6, context=38e-9, token=22e-6, pair=1.5e-9),
        Limits(
            max_rows=256,
            max_step_tokens=256 + 1024,
            kv_bytes=60_000_000_000,
            geometry=_layers(36, 2 * 8 * 128 * 2),
            step_seconds=0.02,
            max_step_stretch=2.0,
            paged=True,
        ),
    ),
    # SmolLM2-135M in float32, with bfloat16 weights for small batches: 30 layers, 3 key heads of
    # 64. A step takes 26 ms for one row, 57 ms for 16 rows of 130 tokens (attention 9 ms), and
    # 555 ms for these rows and 500 prompt tokens (attention 45 ms).
    "cpu-smollm2-135m": Machine(
        StepCost(step=24e-3, row=1.5e-3, context=4.3e-6, token=0.91e-3, pair=1.8e-6),
        Limits(
            max_rows=32,
            max_step_tokens=32 + 512,
            kv_bytes=4_000_000_000,
            geometry=_layers(30, 2 * 3 * 64 * 4),
            bands=4,
            band_bytes=96 << 20,
        ),
    ),
}
