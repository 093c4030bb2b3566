"""Samples from weights in a way that hardly depends on how the weights are rounded.

A row's logits differ by 1e-5 depending on what else is computed. Inverting the cumulative sum is
fast, but it adds up the rounding errors of all earlier weights: such a difference then gives
another token every few dozen or hundred draws. In an exponential race, every token gets an
exponentially distributed time divided by its weight, and the first token wins. The probabilities
are the same, but rounding matters only between two nearly equal times. A race needs a random number
and a logarithm per token. So the cumulative sum chooses one of a few parts of the vocabulary, and a
race chooses within that part.
"""

from __future__ import annotations

import mlx.core as mx

from chairlift.engine.cpu.compiled.llvm.sampling.choice import PARTS
from chairlift.engine.cpu.compiled.llvm.sampling.random import BELOW_ONE, MIN_TIME


def uniform_numbers(keys: mx.array, vocabulary: int) -> mx.array:
    """The random numbers of a draw: ``[rows, 1 + ceil(vocabulary / PARTS)]`` float32 below 1.

    The first of a row draws a part of the vocabulary, the others are for that part's tokens.

    Args:
        keys: ``[rows, 2]`` uint32, MLX's random keys.
    """
    count = 1 + -(-vocabulary // PARTS)
    numbers: mx.array = mx.vmap(lambda key: mx.random.uniform(shape=(count,), key=key))(keys)
    return numbers


def sample_categorical(weights: mx.array, keys: mx.array) -> mx.array:
    """Samples one token for each row.

    On a GPU a cumulative sum need not be monotonic. So a part is chosen only if its own sum is
    above 0, and a token only if its own weight is.

    Args:
        weights: ``[rows, vocabulary]`` float32, none negative, some positive.
        keys: ``[rows, 2]`` uint32, MLX's random keys.

    Returns:
        ``[rows]`` int32, each below ``vocabulary`` whatever the weights are; never a token whose
        weight is 0 or NaN, if the row has another.
    """
    rows, vocabulary = weights.shape
    length = -(-vocabulary // PARTS)
    padded = mx.pad(weights, [(0, 0), (0, PARTS * length - vocabulary)])
    parts = padded.reshape(rows, PARTS, length)
    uniform = uniform_numbers(keys, vocabulary)
    part_sums = parts.sum(axis=-1)
    cumulative = part_sums.cumsum(axis=-1)
    total = cumulative[:, -1:]
    point = mx.minimum(uniform[:, :1] * total, total * BELOW_ONE)
    part = chosen_part(part_sums, cumulative, point)
    running = mx.take_along_axis(parts, part[:, None, None], axis=1)[:, 0]
    times = mx.maximum(-mx.log1p(-uniform[:, 1:]), MIN_TIME)
    # Tokens without weight come last, even after a ratio that is rounded to 0.
    first = mx.argmax(mx.where(running > 0, running / times, -1.0), axis=-1)
    return mx.minimum(part * length + first.astype(mx.int32), vocabulary - 1)


def chosen_part(part_sums: mx.array, cumulative: mx.array, point: mx.array) -> mx.array:
    """The first part with weight whose cumulative sum is above the point; else the heaviest part.

    Args:
        part_sums: ``[rows, PARTS]`` float32, the sum of each part's weights.
        cumulative: ``[rows, PARTS]`` float32, their cumulative sums, not necessarily ascending.
        point: ``[rows, 1]`` float32.

    Returns:
        ``[rows]`` int32, below PARTS; a part with a positive sum, if there is one.
    """
    numbers = mx.arange(PARTS, dtype=mx.int32)
    reached = mx.where((cumulative > point) & (part_sums > 0), numbers, PARTS)
    first = reached.min(axis=-1)
    heaviest = mx.argmax(mx.where(part_sums > 0, part_sums, 0.0), axis=-1).astype(mx.int32)
    return mx.where(first < PARTS, first, heaviest)
