"""Computes the gated delta rule of a prompt's tokens in blocks, where MLX has no kernel for it.

The rule is the recurrent layer of Qwen3-Next, Qwen3.5, Kimi Linear and others. Each token decays a
state ``S`` and corrects it: ``S = S * g + (beta * (v - (S * g) k)) k^T``. Its output is ``S q``.
mlx-lm has a Metal kernel for it; elsewhere it computes one token after the other, some ten
operations for each token of each layer. Here a block of tokens is computed with matrix products
(Yang et al., "Gated Delta Networks", arXiv 2412.06464, and "Kimi Linear", arXiv 2510.26692), and
only the blocks' states one after the other. Results are those of the loop but for the order of
float32 sums. A device may have a kernel of its own, see ``engine.cuda.gated_delta``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from chairlift.engine.model.attention import names_of
from chairlift.engine.model.layers.blocks import block_size, cut, decays, joined, sums

# Maximum tokens of a block: with one decay for each head, and with one for each key dimension.
MAX_BLOCK, MAX_VECTOR_BLOCK = 64, 32
# Fewer tokens are computed one after the other.
MIN_TOKENS = 4
# Tokens whose decays are compared with each other in pairs, and whose system of equations is solved
# by a power series. A tile's product of decays and its inverse are float32 numbers, because of the
# smallest decay; see ``blocks``.
_TILE = 8
# The function of mlx-lm's and mlx-vlm's modules that is replaced, and mlx-vlm's own blocks.
_NAMES = ("gated_delta_ops", "gated_delta_chunked")


class GatedDeltaKernel(Protocol):
    """Computes the rule on a device, for arrays that it takes."""

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array,
        mask: mx.array | None,
    ) -> tuple[mx.array, mx.array] | None:
        """As ``gated_delta_blocks``; None for arrays that the kernel does not take."""
        ...


def install(model: Any, kernel: GatedDeltaKernel | None = None) -> bool:
    """Replaces the loop over tokens that a model's layers call.

    Args:
        kernel: computes what it takes; the rest is computed in blocks.

    Returns:
        Whether any layer calls it.
    """
    found = False
    for layer in model.modules():
        update = names_of(layer).get("gated_delta_update") if callable(layer) else None
        names = getattr(update, "__globals__", {})
        for name in _NAMES:
            if (original := names.get(name)) is not None:
                names[name] = _replaced(getattr(original, "replaces", original), kernel)
                found = True
    return found


def _replaced(original: Callable[..., Any], kernel: GatedDeltaKernel | None) -> Callable[..., Any]:
    def gated_delta(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *more: Any,
        **others: Any,
    ) -> Any:
        # mlx-vlm asks for the states after the first tokens, by one more argument.
        if any(value is not None for value in (*more, *others.values())):
            return original(q, k, v, g, beta, state, mask, *more, **others)
        if kernel is not None and state is not None:
            results = kernel(q, k, v, g, beta, state, mask)
            if results is not None:
                return results
        if q.shape[1] < MIN_TOKENS:
            return original(q, k, v, g, beta, state, mask)
        return gated_delta_blocks(q, k, v, g, beta, state, mask)

    gated_delta.replaces = original  # type: ignore[attr-defined]
    return gated_delta


def gated_delta_blocks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Computes the gated delta rule; the arguments are those of mlx-lm's ``gated_delta_ops``.

    Args:
        q, k: ``[rows, tokens, key heads, key dim]``.
        v: ``[rows, tokens, heads, value dim]``; the heads are a multiple of the key heads.
        g: decays from 0 to 1, ``[rows, tokens, heads]``, or for each key dimension
            ``[rows, tokens, heads, key dim]``.
        beta: ``[rows, tokens, heads]``.
        state: ``[rows, heads, value dim, key dim]``; None: zeros.
        mask: ``[rows, tokens]``; tokens without it change no state, and their outputs are unused.

    Returns:
        Outputs ``[rows, tokens, heads, value dim]`` in the type of ``q``, and the state in its own
        type, float32 by default.
    """
    rows, tokens, key_heads, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    dtype, state_type = q.dtype, mx.float32 if state is None else state.dtype
    vector = g.ndim == 4
    if mask is not None:
        g = mx.where(mask.reshape(rows, tokens, *[1] * (g.ndim - 2)), g, 1)
        beta = mx.where(mask[..., None], beta, 0)
    logs = mx.log(mx.maximum(g.astype(mx.float32), 1e-30))
    # A token behind the last one has no decay and no beta, so it changes nothing.
    block = block_size(tokens, _TILE, MAX_VECTOR_BLOCK if vector else MAX_BLOCK)
    decay = sums(logs, block, key_heads)
    q, k, v, beta = (cut(x, block, key_heads) for x in (q, k, v, beta[..., None]))
    pairs, scores = (_vector_pairs if vector else _scalar_pairs)(q, k, decay)
    if not vector:
        decay = decay[..., None]
    # The numbers that each token adds to the state solve (I + beta pairs) x = beta (v - k S).
    decayed = mx.exp(decay)
    solved = inverse_unit_lower(beta * pairs) @ mx.concatenate(
        [beta * v, beta * decayed * k], axis=-1
    )
    added, removed = solved[..., :value_dim], solved[..., value_dim:]
    readout = mx.concatenate([removed, decayed * q], axis=-2)
    end = decay[..., -1:, :]
    stored = mx.swapaxes(mx.exp(end - decay) * k, -1, -2)
    kept = mx.swapaxes(mx.exp(end), -1, -2)

    grouped = (rows, key_heads, heads // key_heads, value_dim, key_dim)
    memory = mx.zeros(grouped) if state is None else state.astype(mx.float32).reshape(grouped)
    memory = mx.swapaxes(memory, -1, -2)
    outputs = []
    for number in range(len(added)):
        read = readout[number] @ memory
        new = added[number] - read[..., :block, :]
        outputs.append(read[..., block:, :] + scores[number] @ new)
        memory = kept[number] * memory + stored[number] @ new
    memory = mx.swapaxes(memory, -1, -2).reshape(rows, heads, value_dim, key_dim)
    return joined(outputs, tokens).astype(dtype), memory.astype(state_type)


def _scalar_pairs(q: mx.array, k: mx.array, decay: mx.array) -> tuple[mx.array, mx.array]:
    """Products of keys with earlier keys, and of queries with keys up to their own, decayed.

    Args:
        decay: sums of logarithms from a block's begin, ``[..., tokens]``.

    Returns:
        Both ``[..., tokens, tokens]``.
    """
    between = decays(decay)
    keys = mx.swapaxes(k, -1, -2)
    return mx.tril(between * (k @ keys), -1), mx.tril(between * (q @ keys))


def _vector_pairs(q: mx.array, k: mx.array, decay: mx.array) -> tuple[mx.array, mx.array]:
    """As ``_scalar_pairs``, with decays ``[..., tokens, key dim]``.

    A product of decays between two tokens is that from a reference to one of them, divided by that
    to the other. Each tile of tokens has two references. For keys of earlier tiles it is the tile's
    begin, so that both factors are at most 1. Within the tile it is the middle, so that no factor
    is larger than half of a tile's decays.
    """
    count = k.shape[-2]
    queries = [q, k]
    pairs: list[list[mx.array]] = [[], []]
    for start in range(0, count, _TILE):
        tile = slice(start, start + _TILE)
        here = decay[..., tile, :]
        middle = decay[..., start + _TILE // 2 - 1 : start + _TILE // 2, :]
        near = mx.swapaxes(mx.exp(middle - here) * k[..., tile, :], -1, -2)
        from_middle, earlier = mx.exp(here - middle), None
        if start:
            begin = decay[..., start - 1 : start, :]
            from_begin = mx.exp(here - begin)
            earlier = mx.exp(begin - decay[..., :start, :]) * k[..., :start, :]
            earlier = mx.swapaxes(earlier, -1, -2)
        for number, (x, diagonal) in enumerate(zip(queries, (0, -1), strict=True)):
            own = x[..., tile, :]
            # Where a factor has overflowed, the token is a later one, and ``where`` drops it.
            visible = mx.tril(mx.ones((_TILE, _TILE), mx.bool_), diagonal)
            parts = [mx.where(visible, (own * from_middle) @ near, 0)]
            if earlier is not None:
                parts.insert(0, (own * from_begin) @ earlier)
            if rest := count - start - _TILE:
                parts.append(mx.zeros((*parts[0].shape[:-1], rest)))
            pairs[number].append(mx.concatenate(parts, axis=-1))
    scores, keys = (mx.concatenate(each, axis=-2) for each in pairs)
    return keys, scores


def inverse_unit_lower(lower: mx.array) -> mx.array:
    """The inverse of ``I + lower``.

    Tiles on the diagonal are inverted by a power series, which ends because their powers do; then
    two neighbours at a time become one. A series for the whole would add huge numbers that cancel
    each other out.

    Args:
        lower: ``[..., n, n]``, 0 on the diagonal and above; ``n`` is a power of 2 times 8.

    Returns:
        ``[..., n, n]``.
    """
    size = lower.shape[-1]
    power = -_diagonal(lower, _TILE, 0)
    inverse = mx.eye(_TILE) + power
    for _ in range(_TILE.bit_length() - 2):
        power = power @ power
        inverse = inverse + inverse @ power
    side = _TILE
    while side < size:
        first, second = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ _diagonal(lower, side, side) @ first)
        upper = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        below = mx.concatenate([corner, second], axis=-1)
        inverse = mx.concatenate([upper, below], axis=-2)
        side *= 2
    return inverse.squeeze(-3)


def _diagonal(matrix: mx.array, side: int, below: int) -> mx.array:
    """Squares along a matrix's diagonal, one after the other.

    Args:
        side: of a square.
        below: rows from the diagonal down to a square, 0 or as many as a square has. So many
            columns are left out behind each square.

    Returns:
        ``[..., squares, side, side]``.
    """
    squares = [
        matrix[..., start + below : start + below + side, start : start + side]
        for start in range(0, matrix.shape[-1], side + below)
    ]
    return mx.stack(squares, axis=-3)
