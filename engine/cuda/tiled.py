"""Products of many tokens with the weights of their experts, plain or quantized, in one kernel.

``grouped``'s kernel reads tokens once for every 32 rows of a weight, and the weights once for every
32 tokens, which takes most of its time if experts have many tokens. Here a block multiplies a tile
of tokens with 128 rows of a weight; both pass through shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from chairlift.engine.cuda.grouped import IN_ORDER, INPUT_NAMES, PairRows, Weights
from chairlift.engine.cuda.paged.chunk_attention import ample_shared
from chairlift.engine.cuda.source import included, launch_bounds

# The least mean number of tokens of an expert from which this takes less time than ``grouped``, by
# the bits of weights (0: plain); measured on an H200 with 32 and with 128 experts.
MIN_TOKENS = {0: 8, 4: 64, 8: 32}
# Tokens of a tile, and the mean number of tokens of an expert from which larger tiles are faster.
SMALL, LARGE = 64, 128
MIN_LARGE = 96
# Threads of a block.
THREADS = 128
# Rows of a weight that a block multiplies.
OUTPUTS = 128
# Inputs that a block takes at once.
DEPTH = 64


def tile_tokens(pairs: int, weights: Weights) -> int | None:
    """The size of tiles for so many pairs; None: ``grouped_product`` is faster."""
    mean = pairs / len(weights.weight)
    if mean < MIN_TOKENS[weights.bits]:
        return None
    return LARGE if mean >= MIN_LARGE else SMALL


def tiled_product(
    x: mx.array, experts: mx.array, weights: Weights, tokens: int, rows: PairRows = IN_ORDER
) -> mx.array:
    """Multiplies each token with the weights of its experts: ``[pairs, outputs]``.

    A pair is a token and one of its experts.

    Args:
        x: ``[tokens, inputs]``.
        experts: ``[pairs]``, ascending; ignored if there is only one expert.
        weights: must be fit.
        tokens: of a tile, SMALL or LARGE.
        rows: of each pair.
    """
    count, outputs = weights.weight.shape[:2]
    one = count == 1 and rows is IN_ORDER
    pairs = len(x) if one else len(experts)
    places = -(-pairs // tokens) if one else pairs // tokens + count
    stages = 3 if tokens == LARGE and ample_shared() else 2
    result: mx.array
    (result,) = _kernel(stages * (tokens + OUTPUTS) * (DEPTH + 8) * 2, _blocks(tokens, weights))(
        inputs=[x, experts, *weights.arrays, *rows.inputs],
        template=[
            *(("T", x.dtype), ("BFLOAT", x.dtype == mx.bfloat16), ("ONE", one)),
            *weights.template,
            *(("TOKENS", tokens), ("OUTPUTS", OUTPUTS), ("DEPTH", DEPTH), ("STAGES", stages)),
        ],
        grid=(-(-outputs // OUTPUTS) * THREADS, places, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(pairs, outputs)],
        output_dtypes=[x.dtype],
    )
    return result


def _blocks(tokens: int, weights: Weights) -> int:
    """How many blocks a processor has registers for; weights of 8 bits need more of them."""
    if tokens == LARGE:
        return 2
    return 3 if weights.bits == 8 else 4


@functools.cache
def _kernel(shared_bytes: int, blocks: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"chairlift_tiled_product_{blocks}",
        input_names=INPUT_NAMES,
        output_names=["out"],
        header=included("ptx", "products/grouped_header", "products/tiled_header")
        + launch_bounds(THREADS, blocks),
        source=included("products/tiled"),
        shared_memory=shared_bytes,
    )
