"""A sequence: its tokens, how many of them are computed, and its timestamps."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Literal

from chairlift.cache.token_ids import TYPE

# No version of the prefix cache, and no tokens.
NO_MATCH = (-1, 0)


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one prompt.

    Until its prompt is computed, one sequence stands for all ``n`` choices of its request; then it
    forks. Times are seconds of ``time.monotonic()``.

    Attributes:
        request_id: the request that it belongs to.
        tokens: the prompt and the output read so far.
        max_tokens: maximum output tokens. With 0 it ends with its prompt and takes no row.
        index: its number among the request's choices.
        n: the request's choices.
        arrival: when the request arrived.
        priority: its class; lower is served earlier.
        due: when it is due; set by the scheduler, first in ``rank``.
        slack: seconds for which others may overtake it until its prompt is computed; set by the
            scheduler whenever it may begin.
        number: its number in order of arrival; set by the scheduler, second in ``rank``.
        band: the band of its row; set by the scheduler.
        computed: tokens whose KV is cached, or computed by a step that was launched.
        in_flight: tokens that were sampled but not read back yet. They count in ``num_tokens``
            although their ids are still unknown.
        cache_salt: sequences share prefixes only within one salt.
        adapter: the key of its LoRA adapter; "" is none. Its salt depends on it.
        cached: tokens that were cached when it was first scheduled; None before that.
        shared: prompt tokens that other prompts are known to begin with as well.
        match: the version of the prefix cache at its last look-up, and the tokens found.
        pages: numbers of the full pages of the prefix cache from which it began, or would begin
            after its last look-up. Rows and prompts that have the same number share the page.
        copies_page: whether that prefix ends within a page, which is copied when it begins.
        prompt_bytes: bytes reserved for its prompt's cache, from its first chunk until its rows
            have joined.
        prompt_tokens: length of the prompt.
        max_total_tokens: the maximum tokens, prompt and output, that it may reach.
        forked: whether it stands for one choice only.
        shares_prompt: whether its row began with the cache of a prompt that other choices of the
            request began with as well; set by the scheduler whenever its row begins.
        finished: whether it has ended.
        nonfinite: whether it has ended because of values that are not finite. The KV of its row
            may contain such values too.
        drafted: whether it has had a draft. Its row may contain the KV of wrong tokens.
        replay: whether it repeats a request for the canary, so that no client waits for it.
        prompt_logprobs: how many top log-probabilities each prompt position gets besides the
            prompt token's own; None: none are computed. Reset once the prompt is computed.
        pooling: how to pool the prompt's hidden states into an embedding; None: no embedding.
        keys: the prompt as the prefix cache compares it, where other things than token ids make its
            embeddings; None: the tokens themselves.
        uncut: prompt tokens that have to be in one chunk, in order.
        chunks: for each chunk of its prompt, the time when the step was built, and the tokens.
        scheduled_at: when its first chunk was scheduled.
        first_token_at: when its first output token was read.
        last_token_at: when its latest output token was read.
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    index: int = 0
    n: int = 1
    arrival: float = 0.0
    priority: int = 0
    due: float = 0.0
    slack: float = 0.0
    number: int = 0
    band: int = 0
    computed: int = 0
    in_flight: int = 0
    cache_salt: str = ""
    adapter: str = ""
    cached: int | None = None
    shared: int = 0
    match: tuple[int, int] = NO_MATCH
    pages: tuple[int, ...] = ()
    copies_page: bool = False
    prompt_bytes: int = 0
    prompt_tokens: int = 0
    max_total_tokens: int = field(init=False)
    forked: bool = False
    shares_prompt: bool = False
    finished: bool = False
    nonfinite: bool = False
    drafted: bool = False
    replay: bool = False
    prompt_logprobs: int | None = None
    pooling: Literal["mean", "last"] | None = None
    keys: array[int] | None = None
    uncut: tuple[range, ...] = ()
    chunks: list[tuple[float, int]] = field(default_factory=list)
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    _ids: array[int] = field(default_factory=lambda: array(TYPE), init=False, repr=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or len(self.tokens)
        self.max_total_tokens = self.prompt_tokens + self.max_tokens
        self.forked = self.forked or self.n == 1
        if self.keys is not None:
            self._ids = array(TYPE, self.keys)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def ids(self) -> array[int]:
        """``tokens``, with the ``keys`` of the prompt, as C integers; do not change it.

        Extended on each access.
        """
        if len(self._ids) < len(self.tokens):
            self._ids.extend(self.tokens[len(self._ids) :])
        return self._ids

    @property
    def generated(self) -> int:
        """Output tokens, those in flight included."""
        return len(self.tokens) + self.in_flight - self.prompt_tokens

    @property
    def rows(self) -> int:
        """The rows that the sequence takes, or will take once it forks."""
        return self.num_choices if self.max_tokens else 0

    @property
    def scored(self) -> bool:
        """Whether the logits of all prompt positions are computed."""
        return self.prompt_logprobs is not None

    @property
    def bypasses_prefix_cache(self) -> bool:
        """Whether every prompt position has to be computed, so that a cached prefix cannot help.

        Where all of a prompt is in one chunk, its tokens see each other: no prefix is another's.
        """
        whole = (range(self.prompt_tokens),)
        return self.scored or self.pooling == "mean" or self.uncut == whole

    @property
    def choices(self) -> list[int]:
        """The indices of the choices that the sequence stands for."""
        return [self.index] if self.forked else list(range(self.n))

    @property
    def num_choices(self) -> int:
        """The number of choices that the sequence stands for."""
        return 1 if self.forked else self.n

    @property
    def rank(self) -> tuple[float, int, int]:
        """The order in which sequences keep their memory: when due, then arrival. Never changes."""
        return self.due, self.number, self.index

    @property
    def turn(self) -> tuple[float, int, int]:
        """The order in which prompts begin and are computed: as ``rank``, later by the slack."""
        return self.due + self.slack, self.number, self.index

    def fork(self) -> list[Sequence]:
        """The request's choices, each with the shared prompt computed."""
        if self.forked:
            return [self]
        return [
            replace(
                self, tokens=list(self.tokens), chunks=list(self.chunks), index=index, forked=True
            )
            for index in range(self.n)
        ]

    def begin(self, cached: int, prompt_bytes: int) -> None:
        """Begins the prompt after its ``cached`` tokens, with ``prompt_bytes`` reserved."""
        self.computed = cached
        self.prompt_bytes = prompt_bytes
        if self.cached is None:
            self.cached = cached

    def start_over(self) -> None:
        """Resets a preempted sequence: none of its tokens count as computed."""
        self.computed = 0
        self.forget_prefix()

    def forget_prefix(self) -> None:
        """Drops the result of the last look-up in the prefix cache."""
        self.match, self.pages, self.copies_page = NO_MATCH, (), False


def first_to_yield(sequences: list[Sequence]) -> Sequence:
    """Picks the preemption victim: lowest class, latest due, never the globally first.

    The first always fits alone (``Limits.max_context``), so one sequence always advances, and each
    becomes the first at some point. It may not fit beside the buffers of sequences that have just
    yielded: then it yields too, and begins first in the next step, when these buffers are freed.
    """
    first = min(sequences, key=lambda s: s.rank)
    others = [s for s in sequences if s is not first]
    return max(others or [first], key=lambda s: (s.priority, s.rank))
