"""Draws out of weights, that hardly depend on how these are rounded.

Where a uniform number falls in the sum of all weights is quickly found; but where that is among
unlikely tokens, what rounding has added to all before them decides: logits that differ by 1e-5, as
those of a row do with what else is computed, give other tokens every few dozen or hundred draws. In
a race every token runs a time of its own, exponential and over its weight: who is first is drawn
with the same probability, and rounding only counts where two come in nearly together. That takes a
random number and a logarithm for each token; so a few parts of the vocabulary are told apart by
their sums, and the race is run in one of them.
"""

from __future__ import annotations

import mlx.core as mx

PARTS = 16
# A time that is no longer 0.
LEAST = 1e-10
# The largest float32 below 1.
BELOW_ONE = 1 - 2**-24


def drawn(weights: mx.array, keys: mx.array) -> mx.array:
    """One token for each row.

    Args:
        weights: ``[rows, vocabulary]`` float32, none below 0, some above.
        keys: ``[rows, 2]`` uint32, MLX's random keys.

    Returns:
        ``[rows]`` int32; never a token whose weight is 0.
    """
    rows, vocabulary = weights.shape
    length = -(-vocabulary // PARTS)
    padded = mx.pad(weights, [(0, 0), (0, PARTS * length - vocabulary)])
    parts = padded.reshape(rows, PARTS, length)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(1 + length,), key=key))(keys)
    sums = parts.sum(axis=-1).cumsum(axis=-1)
    total = sums[:, -1:]
    point = mx.minimum(uniform[:, :1] * total, total * BELOW_ONE)
    part = (sums <= point).sum(axis=-1)
    running = mx.take_along_axis(parts, part[:, None, None], axis=1)[:, 0]
    times = mx.maximum(-mx.log1p(-uniform[:, 1:]), LEAST)
    first = mx.argmax(running / times, axis=-1)
    return (part * length + first).astype(mx.int32)
