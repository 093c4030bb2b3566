"""A sequence: its tokens, how many of them are computed, and when things happened to it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import Literal

from chairlift.cache.token_ids import TYPE


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one prompt.

    ``tokens`` are the prompt and the output read so far. ``in_flight`` counts tokens that are
    sampled but not read back yet: they are wanted already, though nobody knows them. Until its
    prompt is computed, one sequence stands for all ``n`` choices of its request; then it forks.
    ``priority`` is its class, lower is earlier; ``due`` and ``number`` are its place in line, and
    ``band`` the one that its row is in, which the scheduler gives. ``cached`` is how many of its
    tokens were there already when it was first scheduled; sequences of another ``cache_salt`` give
    it none. ``shared`` is how many others are known to begin with; ``match`` is the version of the
    prefix cache that was asked last, and how many tokens it could give. ``prompt_bytes`` is what is
    reserved for its prompt's cache, from when it begins until its rows have joined. ``chunks`` are
    the steps that computed its prompt: when each was built, and its tokens. Nobody waits for a
    ``replay``. ``nonfinite``: it has ended because its numbers are not finite, nor may be what its
    row holds. Times are seconds of ``time.monotonic()``.

    Until its prompt is computed, ``prompt_logprobs`` is how many of the most likely tokens are to
    be told for each position of that, None if none are wanted, nor the prompt's own; ``pooling`` is
    what its hidden states are wanted for. With ``max_tokens`` 0 it ends there and takes no row.
    """

    request_id: str
    tokens: list[int]
    max_tokens: int
    index: int = 0
    n: int = 1
    arrival: float = 0.0
    priority: int = 0
    due: float = 0.0
    number: int = 0
    band: int = 0
    computed: int = 0
    in_flight: int = 0
    cache_salt: str = ""
    cached: int | None = None
    shared: int = 0
    match: tuple[int, int] = (-1, 0)
    prompt_bytes: int = 0
    prompt_tokens: int = field(default=0)
    forked: bool = False
    finished: bool = False
    nonfinite: bool = False
    replay: bool = False
    prompt_logprobs: int | None = None
    pooling: Literal["mean", "last"] | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    _ids: array[int] = field(default_factory=lambda: array(TYPE), init=False, repr=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = self.prompt_tokens or len(self.tokens)
        self.forked = self.forked or self.n == 1

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def ids(self) -> array[int]:
        """``tokens`` as C integers, made once and only extended since; not to be changed."""
        if len(self._ids) < len(self.tokens):
            self._ids.extend(self.tokens[len(self._ids) :])
        return self._ids

    @property
    def max_total_tokens(self) -> int:
        """The most tokens, prompt and output, that the sequence may reach."""
        return self.prompt_tokens + self.max_tokens

    @property
    def generated(self) -> int:
        """Output tokens, those in flight included."""
        return self.num_tokens - self.prompt_tokens

    @property
    def rows(self) -> int:
        """How many rows the sequence takes, or will take once it forks."""
        return len(self.choices) if self.max_tokens else 0

    @property
    def scored(self) -> bool:
        """Whether the logits of all its prompt's positions are computed."""
        return self.prompt_logprobs is not None

    @property
    def bypasses_prefix_cache(self) -> bool:
        """Whether each of its positions has to be computed, so no cached prefix helps."""
        return self.scored or self.pooling == "mean"

    @property
    def choices(self) -> list[int]:
        """The choices that the sequence stands for."""
        return [self.index] if self.forked else list(range(self.n))

    @property
    def rank(self) -> tuple[float, int, int]:
        """The sort key of the queue: when the sequence is due, then its arrival. Never changes."""
        return self.due, self.number, self.index

    def fork(self) -> list[Sequence]:
        """The request's choices, each with the shared prompt computed."""
        if self.forked:
            return [self]
        return [
            replace(self, tokens=list(self.tokens), index=index, forked=True)
            for index in range(self.n)
        ]

    def begin(self, cached: int, prompt_bytes: int) -> None:
        """Counts the first tokens as computed, which need not be, and its cache as reserved."""
        self.computed = cached
        self.prompt_bytes = prompt_bytes
        if self.cached is None:
            self.cached = cached

    def start_over(self) -> None:
        """Resets a preempted sequence: nothing is computed until it begins again."""
        self.computed = 0
