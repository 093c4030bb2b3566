"""The results of a step: its outputs, and its statistics for the metrics."""

from __future__ import annotations

import msgspec

from chairlift.engine.messages.outputs import FinishReason, TokenOutput


class FinishedChoice(msgspec.Struct, array_like=True):
    """One finished choice, for the metrics.

    Attributes:
        prompt_tokens, cached_tokens: the request's prompt tokens, and those of them that were taken
            from the prefix cache; the same for each of its ``n`` choices.
        arrival, scheduled, first_token, finished: times; None if that point was never reached.
        last_token: the time of the last token, which is before ``finished`` for an aborted choice
            that was preempted or waited for another engine; None if there was no token.
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
    last_token: float | None = None


class StepStats(msgspec.Struct):
    """The statistics of one step: the recorder's only input from the engine.

    Requests that the server replays count only in ``rows``, memory and times.

    Attributes:
        duration: seconds.
        phases: seconds by phase: "schedule", "encode" (images, between two steps), "launch"
            (building the graph, and dispatching it unless a thread does), "wait" (for the device),
            "mask" (which tokens constrained rows may choose), "output" (reading tokens and
            finishing choices).
        rows: computed rows.
        running, waiting: choices.
        adapters_running: those of ``running`` that have a LoRA adapter.
        prefill_tokens: computed prompt tokens, including those of preempted sequences that are
            computed again.
        decode_tokens: other computed tokens.
        drafts: drafts that were verified.
        draft_tokens: their tokens.
        accepted_tokens: for each draft, how many of its tokens were right.
        ended_prefill_tokens: prompt tokens of the previous step, which this step has waited for; 0
            if there was none. The same holds for the next three.
        ended_rows: rows that got a token in the previous step.
        ended_tokens: the tokens that these rows got.
        ended_seconds: seconds from the end of the step before that to the end of the previous one.
        prefix_queries: prompt tokens of newly scheduled requests, looked up in the prefix cache.
            Counted once per request, and again after a preemption that lost its state; 0 without
            the cache.
        prefix_hits: those of ``prefix_queries`` that were found. They are not computed, so they are
            not in ``prefill_tokens``.
        prefix_bytes: memory of cached prefixes.
        prefix_evictions: prefixes dropped since the last step to free memory.
        store_files: prefix files since the last step, by what happened to them. This and the next
            three are empty without a directory for prefixes.
        store_io_bytes: bytes "written" and "read" since the last step.
        store_read_seconds: time of the reads since the last step.
        store_bytes: bytes on "disk" and in the "queue".
        preemptions: preempted sequences.
        resumed: preempted sequences that continue in this step, by where their state was:
            "memory", "disk", or "recompute" if it was not kept.
        swapped_bytes: states of preempted sequences, by where they are: "memory" or "disk".
        total_columns: KV columns of all rows in the decode batch.
        padded_columns: those of ``total_columns`` that contain no token.
        kv_reserved_bytes, kv_used_bytes, kv_limit_bytes: memory of KV buffers, of the tokens in
            them, and the budget.
        memory_active, memory_peak, memory_cache: MLX's memory in bytes.
        grammar_hits: grammars of new requests that were compiled already.
        grammar_seconds: the compile time of each other grammar.
        image_queries: images of new requests.
        image_hits: those of ``image_queries`` that need no encoding.
        image_seconds: the time of encoding each other image.
        image_bytes: memory of the embeddings of images.
        output_tokens: tokens of the choices' outputs.
        first_token_latencies: seconds from arrival to the first token, for each choice that got its
            first token in this step.
        inter_token_latencies: seconds since the same choice's previous output, for each output.
        rows_failed: choices that failed in a step while others went on, by reason
            (``core.failures``).
    """

    duration: float = 0.0
    phases: dict[str, float] = {}
    rows: int = 0
    running: int = 0
    waiting: int = 0
    adapters_running: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: list[int] = []
    ended_prefill_tokens: int = 0
    ended_rows: int = 0
    ended_tokens: int = 0
    ended_seconds: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefix_bytes: int = 0
    prefix_evictions: int = 0
    store_files: dict[str, int] = {}
    store_io_bytes: dict[str, int] = {}
    store_read_seconds: float = 0.0
    store_bytes: dict[str, int] = {}
    preemptions: int = 0
    resumed: dict[str, int] = {}
    swapped_bytes: dict[str, int] = {}
    total_columns: int = 0
    padded_columns: int = 0
    kv_reserved_bytes: int = 0
    kv_used_bytes: int = 0
    kv_limit_bytes: int = 0
    memory_active: int = 0
    memory_peak: int = 0
    memory_cache: int = 0
    grammar_hits: int = 0
    grammar_seconds: list[float] = []
    image_queries: int = 0
    image_hits: int = 0
    image_seconds: list[float] = []
    image_bytes: int = 0
    output_tokens: int = 0
    first_token_latencies: list[float] = []
    inter_token_latencies: list[float] = []
    finished: list[FinishedChoice] = []
    rows_failed: dict[str, int] = {}


class StepOutput(msgspec.Struct, tag=True):
    """The outputs of one step for all its rows, and its statistics."""

    outputs: list[TokenOutput]
    stats: StepStats
