"""The prompts in prefill: each has its own cache until its row joins the decode batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from chairlift.cache.capacity import Capacity
from chairlift.cache.kinds import Cache
from chairlift.cache.snapshot import Snapshot
from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.prefix_cache import PrefixCache
from chairlift.engine.lora.adapters import Adapters
from chairlift.engine.model.chunk import Chunk
from chairlift.engine.model.vision.encoder import ImageEncoder
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import Plan
from chairlift.scheduler.sequence import Sequence


class PrefillBatch:
    """The caches of sequences in prefill, one row each.

    Args:
        make_cache: makes an empty cache for one prompt.
        prefixes: provides cached prefixes, and gets the computed ones.
        swap: provides the states of preempted sequences.
        limits: determine the size of each cache.
        adapters: give the slot of each sequence's adapter.
        images: give the images of each sequence's prompt.
    """

    def __init__(
        self,
        make_cache: Callable[[], Cache],
        prefixes: PrefixCache,
        swap: Swap[Sequence],
        limits: Limits,
        adapters: Adapters,
        images: ImageEncoder,
    ) -> None:
        self._make_cache = make_cache
        self._limits = limits
        self._adapters = adapters
        self._images = images
        self._prefixes = prefixes
        self._swap = swap
        self._caches: dict[Sequence, Cache] = {}

    @property
    def nbytes(self) -> int:
        """The caches' size in bytes, between two steps."""
        return sum(cache.nbytes for cache in self._caches.values())

    def state(self, sequence: Sequence) -> Snapshot | None:
        """The state of a sequence's prompt so far; None if the sequence is not in prefill."""
        cache = self._caches.get(sequence)
        return cache.extract(0) if cache else None

    def begin(self, plan: Plan) -> dict[Sequence, Snapshot | None]:
        """Returns the states from which a plan's new sequences begin.

        Drops the caches of sequences that ended or were preempted.
        """
        for sequence in list(self._caches):
            if sequence.finished or sequence in plan.preempted:
                del self._caches[sequence]
        return {
            sequence: self._swap.take(sequence)
            if self._swap.covers(sequence)
            else self._prefixes.state(sequence, cached)
            for sequence, cached in plan.cached.items()
        }

    def chunks(self, plan: Plan, states: Mapping[Sequence, Snapshot | None]) -> list[Chunk]:
        """Returns a plan's chunks; ``states`` are those of ``begin``.

        NOTE: call it after the leaving rows have left. Until then, their memory is in use.
        """
        for sequence, state in states.items():
            self._caches[sequence] = self._cache(sequence, plan.cached[sequence], state)
        choices = Counter(plan.joins.values())
        chunks = []
        for sequence, tokens in plan.chunks.items():
            cache = self._caches[sequence]
            start = cache.offsets[0]
            chunks.append(
                Chunk(
                    cache,
                    sequence.tokens[start : start + tokens],
                    choices[sequence],
                    _scored(sequence, start, tokens),
                    sequence.pooling is not None,
                    self._adapters.slot(sequence.adapter),
                    self._images.images_of(sequence.request_id),
                )
            )
        return chunks

    def states(self, plan: Plan) -> dict[Sequence, Snapshot]:
        """Returns the first state of each joining choice; adds all chunks to the prefix cache."""
        if self._prefixes.active:
            for sequence in plan.chunks:
                self._prefixes.keep(sequence, self._caches[sequence], 0)
        for sequence in set(plan.ends.values()):
            del self._caches[sequence]
        ended = {s: self._caches.pop(s).hand_over(0) for s in set(plan.joins.values())}
        return {choice: ended[sequence] for choice, sequence in plan.joins.items()}

    def _cache(self, sequence: Sequence, cached: int, state: Snapshot | None) -> Cache:
        """Makes a cache as large as the prompt needs, filled with its swapped or cached tokens."""
        cache = self._make_cache()
        size = self._limits.prompt_size(sequence.num_tokens, cached)
        cache.resize(Capacity(1, size.columns), size.step)
        cache.join(state)
        return cache


def _scored(sequence: Sequence, start: int, tokens: int) -> int:
    """The number of a chunk's tokens whose logits score the prompt token after them."""
    if not sequence.scored:
        return 0
    return max(0, min(tokens, sequence.prompt_tokens - 1 - start))
