"""One step: built as a graph, dispatched to the device, waited for, and read.

NOTE: MLX writes into a KV buffer in place only if nothing else references it, and an operation
references its inputs until it has run. A step that is dispatched while the previous step still runs
would therefore copy every buffer that it writes (measured: 220 ms against 7 for a buffer of 246 MB
on the CPU). So the next step is built while this one runs, then the engine waits for this one,
dispatches the next, and only then reads this one's tokens: the device idles for microseconds, and
nothing is copied. If the caches are pages, which kernels write without MLX, the engine does not
have to wait, and another thread may dispatch the step (``engine.device.dispatch``).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, chain

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.engine.core.prompt_outputs import PromptOutput
from chairlift.engine.device.dispatch import Dispatcher
from chairlift.engine.sampling.sampler import Sampled
from chairlift.scheduler.sequence import Sequence


@dataclass(slots=True)
class Step:
    """The graph of one step, and after ``wait`` its results.

    Attributes:
        rows: the sequences that get a token, in the order of ``sampled``.
        drafts: the draft of each of ``rows``, which the step verifies; empty if no row has one.
        sampled: the tokens after each row's last token and after each token of its draft; None
            until they are sampled, or if there are no rows.
        logits: ``[tokens of rows, vocabulary]`` until the step is sampled, if that is only after
            its dispatch; see ``Pipeline``.
        before_dispatch: arrays to evaluate before the rest is dispatched.
        side_effects: cache buffers that nothing sampled depends on: chunks of prompts, recurrent
            states.
        queued: the step may be dispatched while the previous step still runs.
        computed: all sequences of the step, including those whose prompt continues afterwards.
        prompt_only: sequences that end with their prompt; no token is sampled for them.
        prompt_outputs: the requested outputs of the prompts that end with this step.
    """

    rows: list[Sequence] = field(default_factory=list)
    drafts: list[Seq[int]] = field(default_factory=list)
    sampled: Sampled | None = None
    logits: mx.array | None = None
    before_dispatch: list[mx.array] = field(default_factory=list)
    side_effects: list[mx.array] = field(default_factory=list)
    queued: bool = False
    computed: list[Sequence] = field(default_factory=list)
    prompt_only: list[Sequence] = field(default_factory=list)
    prompt_outputs: dict[Sequence, PromptOutput] = field(default_factory=dict)
    _outcomes: list[list[int]] | None = None
    # The results to wait for.
    _awaited: list[mx.array] = field(default_factory=list)

    def dispatch(self, dispatcher: Dispatcher) -> None:
        """Dispatches the graph to the device, without waiting."""
        if not self.queued:
            mx.eval(self.before_dispatch)
        self.before_dispatch = []
        results = self._results
        self._awaited = results
        if dispatcher.threaded:
            # Wait only for one that the next step does not read, because that is dispatched then.
            # All results of one call become available together.
            last = mx.zeros((1,)) if self.sampled is None else self.sampled.outcomes
            self._awaited = [last]
            results = [*results, last]
        dispatcher.dispatch(results)

    def sample(self, sampled: Sampled, dispatcher: Dispatcher) -> None:
        """Dispatches the sampling of a step that was dispatched with ``logits``."""
        self.sampled, self.logits = sampled, None
        dispatcher.dispatch(sampled.arrays)
        self._awaited = [sampled.outcomes]

    def wait(self) -> None:
        """Waits until the device has computed the step."""
        mx.eval(self._awaited)
        self._awaited, self.side_effects = [], []

    def release(self) -> None:
        """Waits until the device has also released the step's buffers.

        NOTE: on CUDA, results are available before their inputs are released.
        """
        self.wait()
        mx.synchronize()

    @property
    def outcomes(self) -> list[list[int]]:
        """The outcomes of each row, once computed: tokens, or failure codes.

        See ``sampling.outcomes``. A row without a draft has one. A row with a draft has one for
        each token of the draft that is right, and the one that follows these.
        """
        if self._outcomes is None:
            self._outcomes = self._read()
        return self._outcomes

    def _read(self) -> list[list[int]]:
        if self.sampled is None:
            return []
        sampled = np.array(self.sampled.outcomes)
        if not self.drafts:
            return [[outcome] for outcome in sampled.tolist()]
        return accepted(self.drafts, sampled)

    @property
    def starts(self) -> list[int]:
        """The number of each row's first line in ``sampled``."""
        if not self.drafts:
            return list(range(len(self.rows)))
        return list(accumulate((len(draft) + 1 for draft in self.drafts[:-1]), initial=0))

    @property
    def _results(self) -> list[mx.array]:
        logits = [] if self.logits is None else [self.logits]
        return self.side_effects + logits + (self.sampled.arrays if self.sampled else [])


def accepted(drafts: Seq[Seq[int]], sampled: NDArray[np.int32]) -> list[list[int]]:
    """The outcomes that each row keeps: as many as its draft has right ones, and the next.

    Args:
        drafts: the draft of each row.
        sampled: ``[tokens]``, the outcomes after each row's last token and after each token of its
            draft, row by row.
    """
    # NOTE: the device waits for this.
    lengths = np.fromiter(map(len, drafts), np.int64, len(drafts))
    proposed = np.fromiter(chain.from_iterable(drafts), np.int64, lengths.sum())
    rows = np.arange(len(drafts))
    begins = np.cumsum(lengths) - lengths
    # Each row before a token has one outcome more than its draft has tokens.
    outcomes = sampled[np.arange(len(proposed)) + np.repeat(rows, lengths)]
    wrong = np.flatnonzero(outcomes != proposed)
    first_wrong = np.append(wrong, len(proposed))[np.searchsorted(wrong, begins)]
    starts = begins + rows
    stops = starts + np.minimum(first_wrong - begins, lengths) + 1
    found = sampled.tolist()
    return [found[i:j] for i, j in zip(starts.tolist(), stops.tolist(), strict=True)]
