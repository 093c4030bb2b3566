"""One step: built as a graph, dispatched to the device, waited for, and read.

NOTE: MLX writes into a KV buffer in place only if nothing else holds it any more, and an operation
holds its inputs until it has run. A step dispatched while the one before still runs would therefore
copy every buffer it writes (measured: 220 ms against 7 for a buffer of 246 MB on the CPU). So the
next step is built while this one runs, then this one is waited for, then the next is dispatched,
and only then are this one's tokens read: the device rests for microseconds, and nothing is copied.
Where buffers are written to without MLX (``LayerCache.queued``) nothing has to be waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx

from chairlift.engine.core.prompt_outputs import PromptOutput
from chairlift.engine.sampling.sampler import Sampled
from chairlift.scheduler.sequence import Sequence


@dataclass(slots=True)
class Step:
    """The graph of one step, and after ``wait`` its results.

    Attributes:
        rows: the sequences that get a token, in the order of ``sampled``.
        sampled: their tokens; None until they are sampled, or if there are no rows.
        logits: ``[rows, vocabulary]`` while nothing is sampled yet, because what constrained rows
            may choose is only known with the tokens of the step before.
        before_dispatch: arrays to evaluate before the rest is dispatched.
        side_effects: cache buffers that nothing sampled depends on: chunks of prompts, recurrent
            states.
        queued: the step may be dispatched while the one before still runs.
        computed: all sequences of the step, also those whose prompt goes on afterwards.
        prompt_only: sequences that end with their prompt; no token of theirs is sampled.
        prompt_outputs: what was asked of the prompts that end with this step.
    """

    rows: list[Sequence] = field(default_factory=list)
    sampled: Sampled | None = None
    logits: mx.array | None = None
    before_dispatch: list[mx.array] = field(default_factory=list)
    side_effects: list[mx.array] = field(default_factory=list)
    queued: bool = False
    computed: list[Sequence] = field(default_factory=list)
    prompt_only: list[Sequence] = field(default_factory=list)
    prompt_outputs: dict[Sequence, PromptOutput] = field(default_factory=dict)

    def dispatch(self) -> None:
        """Hands the graph to the device and returns."""
        if not self.queued:
            mx.eval(self.before_dispatch)
        self.before_dispatch = []
        mx.async_eval(self._results)

    def sample(self, sampled: Sampled) -> None:
        """Hands the device the rest, which it goes on with."""
        self.sampled, self.logits = sampled, None
        mx.async_eval(sampled.arrays)

    def wait(self) -> None:
        """Returns when the device has computed it."""
        mx.eval(self._results)
        self.side_effects = []

    def release(self) -> None:
        """Returns when the device has let go of the buffers as well.

        NOTE: on CUDA results are there before their inputs are let go of.
        """
        self.wait()
        mx.synchronize()

    @property
    def outcomes(self) -> list[int]:
        """Each row's token or failure code (see ``sampling.outcomes``), once computed."""
        outcomes: Any = [] if self.sampled is None else self.sampled.outcomes.tolist()
        return cast("list[int]", outcomes)

    @property
    def _results(self) -> list[mx.array]:
        logits = [] if self.logits is None else [self.logits]
        return self.side_effects + logits + (self.sampled.arrays if self.sampled else [])
