"""The messages between the API process and the engine process.

Plain msgspec structs, encoded as MessagePack. Times are seconds of ``time.monotonic()``, which
all processes of one machine share; sizes are bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Literal

import msgspec

from chairlift.scheduler.limits import Limits

# How a prompt's last hidden states become one: the mean of all, or that of its last token.
Pooling = Literal["mean", "last"]

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_TOP_LOGPROBS = 20
# Classes of requests are whole numbers from -MAX_PRIORITY to this; lower ones are earlier.
MAX_PRIORITY = 100


class Grammar(msgspec.Struct, frozen=True):
    """What an output has to be, as a formal language.

    ``text`` is a JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark's
    notation as llguidance reads it; of "json_object" it is empty.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    text: str = ""


class Thinking(msgspec.Struct, frozen=True):
    """A thought that goes before the reply, which a grammar does not hold for.

    ``end`` are the token ids that end it, at least one. Once it has ``budget`` tokens without them
    they are forced; None never does. With a ``start`` there is a thought only if the output begins
    with that token; without one the prompt has begun it.
    """

    end: tuple[int, ...]
    budget: int | None = None
    start: int | None = None


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request's tokens are chosen, and when it ends.

    ``max_tokens`` counts output tokens. ``temperature`` below 1e-5 is greedy. ``top_k`` 0,
    ``top_p`` 1 and ``min_p`` 0 are off. ``repetition_penalty`` divides (multiplies, where negative)
    the logits of all tokens seen in prompt and output; ``presence_penalty`` and
    ``frequency_penalty`` subtract for output tokens. ``logit_bias`` adds to the logits of token
    ids. The same ``seed`` gives the same tokens, whatever else is in the batch; choice i of n uses
    ``seed + i``. ``logprobs`` None reports none, k reports the chosen token's and the k most likely
    ones'. They are the model's own log-probabilities, before temperature, penalties and bias.
    ``stop_token_ids`` are all ids that end the text, the model's own end-of-text ids included
    unless they are to be ignored; none of them is chosen before ``min_tokens``, unless the grammar
    allows nothing else. ``grammar`` is what the output has to be, all of it or, with ``thinking``,
    what follows the thought; None allows anything.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    thinking: Thinking | None = None


class Resumed(msgspec.Struct, array_like=True, frozen=True):
    """A choice that an engine has begun and not finished, to go on from there in another.

    ``output`` are its tokens so far. ``cached_tokens`` and the times are those it was begun with,
    None and 0 of one that has no token yet.
    """

    index: int
    output: list[int]
    cached_tokens: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A prompt to be continued ``n`` times. ``arrival`` is when the server received it.

    ``cache_salt`` keeps tenants apart: a prefix is shared only between requests of the same salt,
    the empty one being a salt like any other. ``priority`` is its class: lower is earlier. A
    ``replay`` is the server's own: no user's metric counts it, and the prefix cache keeps nothing.
    ``resumed`` are the choices still to be finished of a request that goes on; none: it is new.
    ``prompt_logprobs`` None reports none of the prompt's tokens, k each one's own log-probability
    and the k most likely ones'. ``pooling`` asks for the model's last hidden states of the prompt,
    as one vector. With ``max_tokens`` 0 only the prompt is computed.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    n: int = 1
    arrival: float = 0.0
    cache_salt: str = ""
    priority: int = 0
    replay: bool = False
    resumed: tuple[Resumed, ...] = ()
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends one choice (or all, ``index`` None) of a request that still runs.

    ``reason`` is "stop" when a stop string was found in its text, "abort" when the client left.
    """

    request_id: str
    index: int | None = None
    reason: FinishReason = "abort"


class Withdraw(msgspec.Struct, tag=True, frozen=True):
    """Takes a request out as if it had never come: it is not reported, and will be resumed."""

    request_id: str


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Asks the engine process to end."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one output position; ``top`` is (token id, logprob), best first."""

    logprob: float
    top: list[tuple[int, float]]


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at all of a prompt's positions but the first, each after those before it.

    ``chosen`` are its own tokens', ``top_ids`` and ``top`` those of the most likely, the same
    number at each position, best first: 32-bit numbers as they lie in memory, for there may be a
    million of them.
    """

    chosen: bytes
    top_ids: bytes
    top: bytes

    def __iter__(self) -> Iterator[TokenLogprobs]:
        """Position by position."""
        chosen, ids, top = array("f", self.chosen), array("i", self.top_ids), array("f", self.top)
        k = len(ids) // len(chosen) if chosen else 0
        for i, logprob in enumerate(chosen):
            best = slice(i * k, (i + 1) * k)
            yield TokenLogprobs(logprob, list(zip(ids[best], top[best], strict=True)))


class PrefillTimes(msgspec.Struct, array_like=True):
    """The times of a request's prefill.

    ``chunks`` are the steps that computed its prompt, at least one: the time at which each was
    built, and its prompt tokens. ``first_token`` is the time at which the first token was read.
    """

    chunks: list[tuple[float, int]]
    first_token: float

    @property
    def scheduled(self) -> float:
        """When its first step was built."""
        return self.chunks[0][0]


class TokenOutput(msgspec.Struct, array_like=True):
    """New tokens of one choice of one request.

    ``finish`` is set on the choice's last output and only there. An end-of-text or stop token that
    ended the choice is counted in usage and is the last of ``token_ids``; its text is not part of
    the reply, which ``ended_by_token`` tells. ``error`` explains a finish of "error".
    ``cached_tokens`` are the request's prompt tokens that were taken from the prefix cache; it is
    told with a choice's first output, to each choice the same, and is 0 in the later ones. So are
    ``prefill_times`` and ``prompt_logprobs``, which are None in those. ``embedding`` is what
    pooling gives, float32 as it lies in memory.
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    ended_by_token: bool = False
    error: str | None = None
    cached_tokens: int = 0
    prefill_times: PrefillTimes | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embedding: bytes | None = None


class FinishedChoice(msgspec.Struct, array_like=True):
    """One finished choice, for the metrics. A time is None if that point was never reached.

    ``cached_tokens`` of the ``prompt_tokens`` were taken from the prefix cache; every choice of a
    request tells all of them, as it does with the prompt's.
    """

    reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    n: int
    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float
    cached_tokens: int = 0


class StepStats(msgspec.Struct):
    """All that the metrics learn of one step; the recorder's only input from the engine."""

    duration: float = 0.0
    # Seconds by phase: "schedule", "launch" (building and dispatching the graph), "wait" (for the
    # device), "mask" (for what constrained rows may choose), "output" (reading tokens and deciding
    # who has finished).
    phases: dict[str, float] = {}
    # Rows computed, replays included, which all that follows leaves out but memory and times.
    rows: int = 0
    running: int = 0
    waiting: int = 0
    # Prompt tokens computed, those of preempted sequences that are computed again included, and
    # other tokens.
    prefill_tokens: int = 0
    decode_tokens: int = 0
    # The step before, which this one has waited for: prompt tokens that it computed, rows that
    # gained a token, and seconds since the one before that. All 0 if there was nothing to wait for.
    ended_prefill_tokens: int = 0
    ended_rows: int = 0
    ended_seconds: float = 0.0
    # The prefix cache, told by the step that schedules a request: its prompt tokens looked up
    # there, and those of them found, which are then not computed and not in prefill_tokens. Once a
    # request, whatever its n, and once more after a preemption whose state was not kept; 0 when the
    # cache is off.
    prefix_queries: int = 0
    prefix_hits: int = 0
    # Bytes that cached prefixes hold in memory now, and entries dropped since the last step to
    # make room.
    prefix_bytes: int = 0
    prefix_evictions: int = 0
    # Prefixes on disk; empty without a directory for them. Since the last step: files by what
    # became of them, bytes "written" and "read", seconds that reads took. Now: bytes on "disk" and
    # in the "queue".
    store_files: dict[str, int] = {}
    store_io_bytes: dict[str, int] = {}
    store_read_seconds: float = 0.0
    store_bytes: dict[str, int] = {}
    preemptions: int = 0
    # Preempted sequences that begin again in this step, by where their state was kept: "memory" or
    # "disk", or nowhere, so that they are computed again ("recompute"). And what is kept there now.
    resumed: dict[str, int] = {}
    swapped_bytes: dict[str, int] = {}
    held_columns: int = 0
    padded_columns: int = 0
    kv_reserved_bytes: int = 0
    kv_used_bytes: int = 0
    kv_limit_bytes: int = 0
    memory_active: int = 0
    memory_peak: int = 0
    memory_cache: int = 0
    # Grammars that requests brought since the last step: those that were compiled already, and the
    # seconds that others took, one entry each.
    grammar_hits: int = 0
    grammar_seconds: list[float] = []
    # Seconds from arrival to first token, one entry a choice whose first token came in this step.
    first_token_latencies: list[float] = []
    # Seconds since the same choice's token before, one entry a token.
    inter_token_latencies: list[float] = []
    finished: list[FinishedChoice] = []
    # Choices that ended as their own part of a step failed, by why (``failures.reason_of``).
    rows_failed: dict[str, int] = {}


class StepOutput(msgspec.Struct, tag=True):
    """What one step produced, for all its rows at once."""

    outputs: list[TokenOutput]
    stats: StepStats


class Loading(msgspec.Struct, tag=True, frozen=True):
    """Progress while the engine starts; ``text`` says what it is doing."""

    text: str


class ModelInfo(msgspec.Struct, tag=True, frozen=True):
    """Sent once, when the engine is ready.

    ``max_context`` is the most tokens (prompt and output) a request can hold: the model's own
    limit, or what fits the KV memory if that is less. ``limits`` is what it is scheduled by.
    ``kv_bits`` and ``kv_group_size`` are those
    of a quantized KV cache, None of one that is not. ``hidden_size`` is how many numbers its last
    hidden states have, None where these cannot be had.
    """

    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_context: int
    max_rows: int
    max_queue: int
    kv_limit_bytes: int
    kv_bytes_per_token: int
    weight_bytes: int
    limits: Limits
    kv_bits: int | None = None
    kv_group_size: int | None = None
    hidden_size: int | None = None

    def shortage(self, tokens: int) -> str | None:
        """Why so many tokens can never fit, if it is memory that they are more than."""
        if self.limits.max_context > self.max_context or tokens <= self.max_context:
            return None
        return self.limits.shortage(tokens)


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not start; ``message`` is one line."""

    message: str


ToEngine = Submit | Abort | Withdraw | Shutdown
FromEngine = StepOutput | Loading | ModelInfo | StartFailed
