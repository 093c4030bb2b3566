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


def sample_categorical(weights: mx.array, keys: mx.array) -> mx.array:
    """One token for each row.

    Nothing here trusts a sum: on a GPU a cumulative sum need not rise from part to part. A part is
    taken only if its own weights are above 0, and a token only if its own weight is.

    Args:
        weights: ``[rows, vocabulary]`` float32, none below 0, some above.
        keys: ``[rows, 2]`` uint32, MLX's random keys.

    Returns:
        ``[rows]`` int32, each below ``vocabulary`` whatever the weights are; never a token whose
        weight is 0 or NaN, if the row has another.
    """
    rows, vocabulary = weights.shape
    length = -(-vocabulary // PARTS)
    padded = mx.pad(weights, [(0, 0), (0, PARTS * length - vocabulary)])
    parts = padded.reshape(rows, PARTS, length)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(1 + length,), key=key))(keys)
    own = parts.sum(axis=-1)
    sums = own.cumsum(axis=-1)
    total = sums[:, -1:]
    point = mx.minimum(uniform[:, :1] * total, total * BELOW_ONE)
    part = chosen_part(own, sums, point)
    running = mx.take_along_axis(parts, part[:, None, None], axis=1)[:, 0]
    times = mx.maximum(-mx.log1p(-uniform[:, 1:]), LEAST)
    # What does not run comes last, also behind a time that is rounded to 0.
    first = mx.argmax(mx.where(running > 0, running / times, -1.0), axis=-1)
    return mx.minimum(part * length + first.astype(mx.int32), vocabulary - 1)


def chosen_part(own: mx.array, sums: mx.array, point: mx.array) -> mx.array:
    """The first part with weight whose cumulative sum is above the point; else the heaviest.

    Args:
        own: ``[rows, PARTS]`` float32, each part's own sum.
        sums: ``[rows, PARTS]`` float32, their cumulative sums, in whatever order these come out.
        point: ``[rows, 1]`` float32.

    Returns:
        ``[rows]`` int32, below PARTS. Its own sum is above 0, if any part's is.
    """
    reached = mx.where((sums > point) & (own > 0), mx.arange(PARTS, dtype=mx.int32), PARTS)
    first = reached.min(axis=-1)
    heaviest = mx.argmax(mx.where(own > 0, own, 0.0), axis=-1).astype(mx.int32)
    return mx.where(first < PARTS, first, heaviest)
