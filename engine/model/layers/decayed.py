"""Linear attention whose state decays, in blocks: state space models (Mamba 2) and gated attention.

Each token decays a state and adds to it: ``S = S * g + k v^T``, and its output is ``q S``. mlx-lm
computes state space models in blocks of 256 tokens, with several passes over all pairs of tokens
and heads, and a decode step as a block of one; gated linear attention token by token. Here blocks
are smaller, all of them are computed together but for their states, and one token needs no pairs
(Dao and Gu, "Transformers are SSMs", arXiv 2405.21060).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, Protocol

import mlx.core as mx

from chairlift.engine.model.attention import names_of
from chairlift.engine.model.layers.blocks import block_size, cut, decays, joined, sums

MIN_BLOCK, MAX_BLOCK = 8, 64


class DecayedKernel(Protocol):
    """Computes the rule on a device, for arrays that it takes."""

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array] | None:
        """As ``decayed_attention``, with decays ``g`` in place of logarithms.

        Args:
            state: ``[rows, heads, value dim, key dim]``, as the result's.

        Returns:
            None for arrays that the kernel does not take.
        """
        ...


def install(model: Any, kernel: DecayedKernel | None = None) -> bool:
    """Replaces mlx-lm's functions that a model's layers call; returns whether any does.

    Args:
        kernel: computes what it takes; the rest is computed in blocks.
    """
    found = False
    for layer in model.modules():
        names = names_of(layer) if callable(layer) else {}
        update = getattr(names.get("ssm_update"), "__globals__", {})
        if _replace(update, "ssm_attn", partial(_ssm_attn, kernel=kernel)):
            found = True
        # A function of that name with a mask computes blocks itself.
        own = names.get("recurrent_gla")
        if own is not None and "mask" not in signature(own).parameters:
            found = _replace(names, "recurrent_gla", partial(_recurrent_gla, kernel=kernel))
    return found


def _replace(names: dict[str, Any], name: str, make: Callable[..., Any]) -> bool:
    """Replaces a global of a module; returns whether it has one of that name."""
    original = names.get(name)
    if original is not None:
        names[name] = make(getattr(original, "replaces", original), names)
    return original is not None


def decayed_attention(
    q: mx.array, k: mx.array, v: mx.array, logs: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Computes linear attention with a state that decays.

    Args:
        q, k: ``[rows, tokens, groups, key dim]``.
        v: ``[rows, tokens, heads, value dim]``; a group's heads are one after the other.
        logs: logarithms of decays, ``[rows, tokens, heads]``, at most 0.
        state: ``[rows, heads, key dim, value dim]``; None: zeros.

    Returns:
        Outputs ``[rows, tokens, heads, value dim]`` and the state, both in float32.
    """
    rows, tokens, groups, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    grouped = (rows, groups, heads // groups, key_dim, value_dim)
    memory = mx.zeros(grouped) if state is None else state.astype(mx.float32).reshape(grouped)
    if tokens == 1:
        q, k, v = (x.astype(mx.float32) for x in (q, k, v))
        decay = mx.exp(logs.astype(mx.float32)).reshape(*grouped[:3], 1, 1)
        added = k.reshape(rows, groups, 1, key_dim, 1) * v.reshape(*grouped[:3], 1, value_dim)
        memory = decay * memory + added
        output = q.reshape(rows, groups, 1, 1, key_dim) @ memory
        return output.reshape(rows, 1, heads, value_dim), memory.reshape(rows, heads, key_dim, -1)
    block = block_size(tokens, MIN_BLOCK, MAX_BLOCK)
    total = sums(logs, block, groups)
    q, k, v = (cut(x, block, groups) for x in (q, k, v))
    within = mx.tril(decays(total) * (q @ mx.swapaxes(k, -1, -2))) @ v
    readout = mx.exp(total)[..., None] * q
    end = total[..., -1:]
    stored = mx.swapaxes(mx.exp(end - total)[..., None] * k, -1, -2) @ v
    kept = mx.exp(end)[..., None]
    outputs = []
    for number in range(len(within)):
        outputs.append(within[number] + readout[number] @ memory)
        memory = kept[number] * memory + stored[number]
    return joined(outputs, tokens), memory.reshape(rows, heads, key_dim, value_dim)


def _computed(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    logs: mx.array,
    state: mx.array | None,
    kernel: DecayedKernel | None,
) -> tuple[mx.array, mx.array]:
    """As ``decayed_attention``, with states ``[rows, heads, value dim, key dim]``."""
    if kernel is not None and state is None and q.dtype == mx.float32:
        state = mx.zeros((v.shape[0], *v.shape[2:], k.shape[-1]))
    if kernel is not None and state is not None:
        results = kernel(q, k, v, mx.exp(logs.astype(mx.float32)), state)
        if results is not None:
            return results
    before = None if state is None else mx.swapaxes(state, -1, -2)
    y, after = decayed_attention(q, k, v, logs, before)
    return y, mx.swapaxes(after, -1, -2)


def _ssm_attn(
    original: Callable[..., Any], names: dict[str, Any], kernel: DecayedKernel | None
) -> Callable[..., Any]:
    """mlx-lm's ``ssm_attn``; ``names`` are the globals of its module."""

    def ssm_attn(
        x: mx.array,
        a_log: mx.array,
        b: mx.array,
        c: mx.array,
        d: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        lengths: mx.array | None = None,
        step: int = MAX_BLOCK,
    ) -> tuple[mx.array, mx.array]:
        dt = names["compute_dt"](dt, dt_bias, time_step_limit).astype(mx.float32)
        valid = mask
        if lengths is not None:
            within = mx.arange(x.shape[1]) < lengths[:, None]
            valid = within if mask is None else within & mask
        if valid is not None:
            # A token whose time step is 0 changes no state.
            dt = mx.where(valid[..., None], dt, 0)
        logs = -mx.exp(a_log.astype(mx.float32)) * dt
        y, new_state = _computed(c, b, dt[..., None] * x, logs, state, kernel)
        y = y + x * d.reshape(-1, 1)
        return y.astype(x.dtype), _as_type(new_state, x.dtype if state is None else state.dtype)

    ssm_attn.replaces = original  # type: ignore[attr-defined]
    return ssm_attn


def _as_type(state: mx.array, dtype: mx.Dtype) -> mx.array:
    """The state in another type; the same object if it has this type already."""
    return state if state.dtype == dtype else state.astype(dtype)


def _recurrent_gla(
    original: Callable[..., Any], _: dict[str, Any], kernel: DecayedKernel | None
) -> Callable[..., Any]:
    """mlx-lm's ``recurrent_gla``, whose arrays are ``[rows, heads, tokens, dim]``."""

    def recurrent_gla(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        scale: float,
        h: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        queries, keys, values = (x.swapaxes(1, 2) for x in (q * scale, k, v))
        rows, tokens, heads, _ = values.shape
        logs = mx.broadcast_to(g.astype(mx.float32), (rows, tokens, heads))
        before = None if h is None else h.swapaxes(2, 3)
        y, state = _computed(queries, keys, values, logs, before, kernel)
        state = state.swapaxes(2, 3)
        return y.swapaxes(1, 2).astype(q.dtype), state.astype(q.dtype if h is None else h.dtype)

    recurrent_gla.replaces = original  # type: ignore[attr-defined]
    return recurrent_gla
