"""The device that MLX computes on, and the engine's settings for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Row groups ("bands") of similar length that attention may read separately, on any device.
BANDS = 4
# Bytes of float32 scores that attention on the CPU computes at once (``model.attention_blocks``).
# Without blocks, 32 heads of a chunk of 512 tokens behind 131,072 others have 8.6 GB of scores.
# Blocks of this size take no longer than larger ones: their products are still hundreds of rows
# high, and they fit in a large L3 cache.
SCORE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The defaults of one kind of device. ``EngineConfig`` overrides those that have a flag.

    Attributes:
        kind: the device; "cuda" also stands for any accelerator that is not Metal.
        max_rows: rows of the decode batch.
        chunk_tokens: prompt tokens of a step, beside one decode token for each row.
        chunk_multiple: chunks are padded to a multiple of this many tokens. Above 1 only where a
            new chunk length costs time, because a plan is compiled for it.
        step_seconds: how long a step may take while rows are decoding; prompts are cut to fit.
        step_stretch: a step with prompts may take this many times as long as its rows alone, if
            that is longer than ``step_seconds``. Other steps may take longer, too: where a single
            prompt token takes long, and for a prompt that would take more than 50 steps. 0: none
            of these.
        avoids_partial_prefill: a prompt waits rather than begin in the remainder of a step.
        lookahead_columns: KV columns that rows get ahead of their tokens, so that buffers grow
            seldom.
        band_bytes: bytes of KV reads that a further band has to save in each step.
        checkpoint_tokens: distance in tokens between the recurrent states kept of a prompt. The
            first request that shares a prefix shares it up to the last of them.
        kv_share: share of the free memory for the KV cache and the prefix cache together.
        scored_bytes: float32 logits of prompt tokens that a step may hold, for prompt logprobs.
        attention_bytes: memory for attention scores during a step. Attention that a model file
            computes by itself gets shorter chunks, so that one layer's scores fit.
        cache_share: share of the free memory for MLX's cache of freed buffers.
        cache_bytes: upper bound of that cache. Without a bound MLX keeps any number of buffers,
            which no budget counts.
        unified_memory: an accelerator uses the host's memory, so swap takes the same memory as KV.
        offloads_swap: states of preempted rows are copied out of MLX's memory.
        compiles_kernels: kernels are compiled at their first use, so the engine warms up.
        dispatches_in_thread: a thread of its own dispatches steps; see ``device.dispatch``.
    """

    kind: Literal["cpu", "cuda", "metal"]
    max_rows: int
    chunk_tokens: int
    chunk_multiple: int
    step_seconds: float
    step_stretch: float
    avoids_partial_prefill: bool
    lookahead_columns: int
    band_bytes: int
    checkpoint_tokens: int
    kv_share: float
    scored_bytes: int
    attention_bytes: int
    cache_share: float
    cache_bytes: int
    unified_memory: bool
    offloads_swap: bool
    compiles_kernels: bool
    dispatches_in_thread: bool

    @property
    def on_cpu(self) -> bool:
        """Whether MLX computes on the CPU."""
        return self.kind == "cpu"

    def max_scored(self, vocabulary: int) -> int:
        """Prompt tokens of a step whose logits may be kept, for logits ``vocabulary`` wide."""
        return max(1, self.scored_bytes // (4 * vocabulary))


CPU = DeviceProfile(
    kind="cpu",
    max_rows=32,
    # A chunk of 512 takes as long as six to eight decode steps.
    chunk_tokens=512,
    chunk_multiple=1,
    # Two cores, 16 rows of a small model: without a limit, rows wait 0.8 to 0.9 s for each chunk of
    # a long prompt; the throughput is 1 % higher than with 0.4 s, and 7 % higher than with 0.25.
    step_seconds=0.4,
    # Rows of a model of billions of parameters need longer for themselves.
    step_stretch=2.0,
    avoids_partial_prefill=False,
    # Growing the buffers of a row of 600 columns by 128 takes as long as one or two of its tokens.
    lookahead_columns=256,
    # A second band turns off decode attention on the host, which costs 6 to 8 ms a step.
    band_bytes=96 << 20,
    checkpoint_tokens=128,
    # The rest of the machine needs memory, too.
    kv_share=0.5,
    scored_bytes=128 << 20,
    attention_bytes=4 * SCORE_BYTES,
    cache_share=1 / 16,
    cache_bytes=512 << 20,
    unified_memory=False,
    offloads_swap=False,
    compiles_kernels=False,
    dispatches_in_thread=False,
)

# Measured on an H200.
CUDA = DeviceProfile(
    kind="cuda",
    max_rows=256,
    chunk_tokens=1024,
    # cuDNN compiles a plan for each new shape; see ``engine.cuda.attention``.
    chunk_multiple=128,
    # Half of the steps of a mixed load take 7 to 12 ms. With 33 ms, the p99 of gaps was 50 ms
    # instead of 31, and the throughput 3 % higher.
    step_seconds=0.02,
    step_stretch=2.0,
    # Each further prompt of a step costs kernel launches, which the GPU waits for.
    avoids_partial_prefill=True,
    lookahead_columns=512,
    # The three launches that a band adds to each layer take as long as reading these bytes.
    band_bytes=1 << 30,
    checkpoint_tokens=256,
    # No other program is expected to take memory of the GPU later; the rest is for activations.
    kv_share=0.85,
    scored_bytes=512 << 20,
    attention_bytes=1 << 30,
    cache_share=1 / 10,
    cache_bytes=16 << 30,
    unified_memory=False,
    offloads_swap=True,
    compiles_kernels=True,
    # Launching a step of an 8B model takes the host 5 to 9 ms, as long as the GPU computes.
    dispatches_in_thread=True,
)

# NOTE: not measured. These values are reasoned from published bandwidths (100 to 800 GB/s) and
# arithmetic (3 to 30 TFLOP/s in float16) of Apple's M1 to M4; measure before relying on them.
METAL = DeviceProfile(
    kind="metal",
    # Decoding is bound by arithmetic beyond some tens of rows, and what sampling needs for 256
    # rows of a large vocabulary, 1.6 GB, is much of a laptop's memory.
    max_rows=64,
    # An 8B model needs 8 TFLOP for 512 tokens, which takes 0.3 to 3 s.
    chunk_tokens=512,
    # MLX's Metal kernels take any length without compiling for it. Chunks are at least 32 tokens
    # long, the scheduler's own minimum.
    chunk_multiple=1,
    # A decode step of an 8B model in bfloat16 reads 16 GB: 20 ms at 800 GB/s, 160 ms at 100. Ten
    # tokens a second are still faster than people read.
    step_seconds=0.1,
    step_stretch=1.75,
    # Prefill is bound by arithmetic and hides the launches of a further prompt.
    avoids_partial_prefill=False,
    # MLX's attention with a mask reads all columns, as on the CPU.
    lookahead_columns=0,
    # Three launches of 5 us in each of 36 layers take as long as reading these bytes at 400 GB/s.
    band_bytes=256 << 20,
    checkpoint_tokens=256,
    # Metal recommends two thirds to three quarters of the memory as the working set, so the system
    # has its part already. The rest of this share is for a step's activations.
    kv_share=0.7,
    scored_bytes=128 << 20,
    attention_bytes=256 << 20,
    # As on the CPU, the cache of buffers takes memory from other programs.
    cache_share=1 / 16,
    cache_bytes=2 << 30,
    unified_memory=True,
    # A copy elsewhere in the same memory would free nothing.
    offloads_swap=False,
    compiles_kernels=True,
    dispatches_in_thread=False,
)


def current() -> DeviceProfile:
    """The profile of MLX's default device."""
    # Imported here, so that the command line's help can show the profiles without MLX.
    import mlx.core as mx

    if mx.default_device() != mx.Device(mx.gpu):
        return CPU
    return METAL if mx.metal.is_available() else CUDA


def name() -> str:
    """The device's own name, as far as MLX knows it, e.g. "NVIDIA H200"."""
    import mlx.core as mx

    info = mx.device_info()
    return str(info.get("device_name") or info.get("architecture") or current().kind)
