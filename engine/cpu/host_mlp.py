"""MLPs that compute without MLX between the products of ``host_linear``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.engine.cpu.elementwise import geglu, swiglu
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.host_linear import LINEAR, Products, array_like, tokens_of
from chairlift.engine.cpu.matrix import apart
from chairlift.engine.cpu.program_builder import ProgramBuilder
from chairlift.engine.model.recorder import record
from chairlift.engine.model.trials.trial import Trial, within_rms

log = logging.getLogger(__name__)

_MLP = ("gate_proj", "up_proj", "down_proj")
# The products are the same ones, so only the activation differs: that of a similar function is
# about 1e-4 of the result away, rounding less than 1e-6.
_TRIAL = Trial(within_rms(1e-5), log, error="an MLP is of another form: %s")
# The root mean squares of the gates of a trial's tokens: functions that are similar for small gates
# differ there, or beyond a limit.
_TRIAL_GATES = (1.0, 8.0)


def install(model: Any) -> None:
    """Replaces a model's MLPs; call it after ``host_linear.install``."""
    fused = sum(_fuse(layer) for _, layer in model.named_modules())
    log.info("%d fused MLPs", fused)


class HostMlp:
    """An MLP with a gate, of few tokens.

    Attributes:
        products: its products.

    Args:
        layer: its layers are of one group, and have host products.
        activation: computes ``[tokens, numbers]`` of those of the gate and of the other layer.
    """

    def __init__(self, layer: Any, activation: Callable[[Floats, Floats], Floats]) -> None:
        self._wide: Products = layer.gate_proj.products
        self._down: Products = layer.down_proj.products
        self._activation = activation
        self.products = self._wide, self._down

    def __call__(self, x: Floats) -> Floats:
        """``[tokens, inputs]`` → ``[tokens, outputs]``; see ``Matrix``."""
        return self._down(self._activation(*self._wide.apart(x)))

    def build(self, build: ProgramBuilder, x: Floats, name: str = "") -> Floats:
        """As a call, without the products' additions.

        Args:
            name: the beginning of the names of arrays.

        Raises:
            NoProgramError: see ``ProgramBuilder``.
        """
        wide = apart(self._wide.build(build, f"{name}wide", x), self._wide.matrix.stops)
        return self._down.build(
            build,
            f"{name}down",
            build.gated(self._activation.__name__, f"{name}gated", *wide),
        )


class GatedMlp(NamedTuple):
    """A ``HostCall``: an MLP of ``[..., inputs]``."""

    mlp: HostMlp


def _fuse(layer: Any) -> bool:
    """Replaces an MLP by one that computes without MLX, if a trial gives the same."""
    if set(layer.children()) != set(_MLP):
        return False
    gate, up, down = (layer[name] for name in _MLP)
    parts = gate, up, down
    if any(type(part) not in LINEAR or "bias" in part for part in parts):
        return False
    if gate.products is not up.products:
        return False  # they are quantized in different ways
    inputs = down.products.matrix.stops[-1]
    x = mx.random.normal((1, len(_TRIAL_GATES), inputs), key=mx.random.key(0))
    sizes = mx.sqrt(gate(x).square().mean(axis=-1, keepdims=True))
    # NOTE: another array than ``x``, for which a product is left; see ``Products.take``.
    trial = x * (mx.array(_TRIAL_GATES)[:, None] / mx.maximum(sizes, 1e-6))
    return any(_fuse_with(layer, activation, trial) for activation in (swiglu, geglu))


def _fuse_with(layer: Any, activation: Callable[[Floats, Floats], Floats], trial: mx.array) -> bool:
    base: Any = type(layer)
    host = HostMlp(layer, activation)

    def fused(layer: Any, x: mx.array) -> mx.array:
        if (stand_in := record(GatedMlp(layer.host), [x], x.shape)) is not None:
            return stand_in
        if not layer.gate_proj.products.takes(x):
            result: mx.array = base.__call__(layer, x)
            return result
        return array_like(layer.host(tokens_of(x)), x)

    if not _TRIAL.passes(lambda: layer(trial), lambda: array_like(host(tokens_of(trial)), trial)):
        return False
    layer.__class__ = type(base.__name__, (base,), {"__call__": fused})
    layer.host = host
    return True
