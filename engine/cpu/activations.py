"""Activation functions in NumPy, in place of those that model files import.

MLX's CPU backend computes powers of e number by number (0.32.4): the layers of a prompt waited for
them longer than for all other operations between products. These functions evaluate their inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn

from chairlift.engine.cpu import elementwise
from chairlift.engine.cpu.compiled.compiled_maps import of_lines
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.model.attention import names_of
from chairlift.engine.model.recorder import is_recording, record

# Numbers from which evaluating them takes less time than MLX's powers.
MIN_NUMBERS = 1 << 14

_Function = Callable[..., mx.array]
# The modules whose functions model files import.
_SHARED = ("mlx_lm.models.activations", "mlx_vlm.models.activations", "mlx_lm.models.gemma4_text")


class Gated(NamedTuple):
    """A ``HostCall``: a function of gates and other numbers; see ``ProgramBuilder.gated``."""

    activation: str


def install(model: Any) -> bool:
    """Replaces the activations in the modules of a model's layers.

    Functions of the same name with another meaning stay.

    Returns:
        Whether a layer may call one of them.
    """
    known = {(name, id(original)) for name, original in _originals()}
    found = False
    for layer in (model, *model.modules()):
        names = names_of(layer) if callable(layer) else {}
        if names.get("nn") in (nn, _nn):
            names["nn"] = _nn
            found = True
        for name, ours in _GATED.items():
            current: Any = names.get(name)
            original: Any = getattr(current, "replaces", current)
            if (name, id(original)) in known:
                found = True
                if current is original:
                    names[name] = _replacing(original, ours)
    return found


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) * x``."""
    if (stand_in := record(Gated("swiglu"), [gate, x], x.shape)) is not None:
        return stand_in
    return _of_gates(elementwise.swiglu, gate, x)


def geglu(gate: mx.array, x: mx.array) -> mx.array | None:
    """``gelu_approx(gate) * x``; None for few numbers."""
    return _of_gates(elementwise.geglu, gate, x) if _is_large(gate) else None


def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array | None:
    """``silu(gate) * x``, which are float32 already; None for few numbers."""
    return _of_gates(elementwise.swiglu, gate, x) if _is_large(gate) else None


def swiglu_oai(
    gate: mx.array, x: mx.array, alpha: float = 1.702, limit: float = 7.0
) -> mx.array | None:
    """``gate * sigmoid(alpha * gate) * (x + 1)``, within limits; None for few numbers."""

    def computed(gates: Floats, others: Floats) -> Floats:
        gates, others = np.minimum(gates, limit), np.clip(others, -limit, limit)
        others += 1
        # The function is silu(alpha * gate) / alpha.
        gates *= np.float32(alpha)
        result = elementwise.swiglu(gates, others)
        result /= np.float32(alpha)
        return result

    return _of_gates(computed, gate, x) if _is_large(gate) else None


_GATED: dict[str, Callable[..., mx.array | None]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "precise_swiglu": precise_swiglu,
    "swiglu_oai": swiglu_oai,
}


def _of_gates(
    function: Callable[[Floats, Floats], Floats], gate: mx.array, x: mx.array
) -> mx.array:
    mx.eval(gate, x)
    flat = (-1, gate.shape[-1])
    return mx.array(function(view(gate).reshape(flat), view(x).reshape(flat))).reshape(x.shape)


def _is_large(x: mx.array) -> bool:
    return x.size >= MIN_NUMBERS and not is_recording()


def _originals() -> Iterator[tuple[str, _Function]]:
    """The functions by name that model files import."""
    for module in filter(None, map(sys.modules.get, _SHARED)):
        for name in _GATED:
            if hasattr(module, name):
                function = getattr(module, name)
                yield name, getattr(function, "replaces", function)


def _replacing(original: _Function, ours: Callable[..., mx.array | None]) -> _Function:
    """``ours`` for float32 arrays of one shape, if it computes them."""

    def activation(*inputs: mx.array, **settings: float) -> mx.array:
        same = {(each.shape, each.dtype) for each in inputs}
        if len(same) == 1 and inputs[0].dtype == mx.float32:
            computed = ours(*inputs, **settings)
            if computed is not None:
                return computed
        return original(*inputs, **settings)

    activation.replaces = original  # type: ignore[attr-defined]
    return activation


def _of_one(name: str, original: _Function) -> _Function:
    """A function of ``llvm.maps`` for many numbers in float32."""

    def activation(x: mx.array) -> mx.array:
        if x.dtype != mx.float32 or not _is_large(x):
            return original(x)
        try:
            mx.eval(x)
        except ValueError:  # MLX compiles a function that calls this one
            return original(x)
        lines = np.ascontiguousarray(view(x)).reshape(-1, x.shape[-1])
        computed = of_lines(name, lines)
        return original(x) if computed is None else mx.array(computed).reshape(x.shape)

    activation.replaces = original  # type: ignore[attr-defined]
    return activation


def _with_ours() -> ModuleType:
    """A module with all that ``mlx.nn`` has, and our functions of one array."""
    module = ModuleType(nn.__name__, nn.__doc__)
    module.__dict__.update(vars(nn))
    for name in ("silu", "gelu_approx"):
        setattr(module, name, _of_one(name, getattr(nn, name)))
    return module


_nn = _with_ours()
