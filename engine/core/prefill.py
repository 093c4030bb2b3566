"""Prompts under way: each has a cache of its own until its row joins the decode batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from chairlift.cache.batch import BatchCache
from chairlift.cache.capacity import Capacity
from chairlift.cache.snapshot import Snapshot
from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.prefix_cache import Prefixes
from chairlift.engine.model.forward import Chunk
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.scheduler import Plan
from chairlift.scheduler.sequence import Sequence


class PrefillBatch:
    """The caches of sequences whose prompt is being computed, one row each.

    Args:
        limits: say how large each cache is.
    """

    def __init__(
        self,
        make_cache: Callable[[], BatchCache],
        prefixes: Prefixes,
        swap: Swap[Sequence],
        limits: Limits,
    ) -> None:
        self._make_cache = make_cache
        self._limits = limits
        self._prefixes = prefixes
        self._swap = swap
        self._caches: dict[Sequence, BatchCache] = {}

    @property
    def nbytes(self) -> int:
        """Bytes the caches take between two steps."""
        return sum(cache.nbytes for cache in self._caches.values())

    def state(self, sequence: Sequence) -> Snapshot | None:
        """What is computed of a sequence's prompt; None if it is not under way."""
        cache = self._caches.get(sequence)
        return cache.extract(0) if cache else None

    def chunks(self, plan: Plan) -> list[Chunk]:
        """What a plan computes of prompts. Those that have ended or lost their place are gone."""
        for sequence in list(self._caches):
            if sequence.finished or sequence in plan.preempted:
                del self._caches[sequence]
        for sequence, cached in plan.cached.items():
            self._caches[sequence] = self._begin(sequence, cached)
        choices = Counter(plan.joins.values())
        chunks = []
        for sequence, tokens in plan.chunks.items():
            cache = self._caches[sequence]
            begun = cache.offsets[0]
            chunks.append(
                Chunk(
                    cache,
                    sequence.tokens[begun : begun + tokens],
                    choices[sequence],
                    _scored(sequence, begun, tokens),
                    sequence.pooling is not None,
                )
            )
        return chunks

    def states(self, plan: Plan) -> dict[Sequence, Snapshot]:
        """What the choices that arrive take with them; feeds the prefix cache on the way."""
        if self._prefixes.active:
            for sequence in plan.chunks:
                self._prefixes.keep(sequence, self._caches[sequence], 0)
        for sequence in set(plan.ends.values()):
            del self._caches[sequence]
        ended = {s: self._caches.pop(s).extract(0) for s in set(plan.joins.values())}
        return {choice: ended[sequence] for choice, sequence in plan.joins.items()}

    def _begin(self, sequence: Sequence, cached: int) -> BatchCache:
        """A cache as large as the prompt will need, with what is there of it."""
        cache = self._make_cache()
        size = self._limits.prompt_size(sequence.wanted, cached)
        cache.resize(Capacity(1, size.columns), size.step)
        swapped = self._swap.covers(sequence)
        state = self._swap.take(sequence) if swapped else self._prefixes.state(sequence, cached)
        cache.join(state)
        return cache


def _scored(sequence: Sequence, begun: int, tokens: int) -> int:
    """How many of a chunk's tokens are followed by one of the prompt whose logprob is wanted."""
    if not sequence.scored:
        return 0
    return max(0, min(tokens, sequence.prompt_tokens - 1 - begun))
