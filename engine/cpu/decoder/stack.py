"""Computes all decoder layers of a step of few tokens in one call.

Between two layers Python, the model file and MLX take as long as a layer of one token. Therefore a
layer that is not the last one only says what there is to compute, and returns its input. The last
one computes it all. That fits models that do nothing with what passes from one layer to the next; a
trial compares the logits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from chairlift.cache.kinds import make_batch
from chairlift.cache.layer import HostPlaces
from chairlift.cache.packed.host_step import host_step
from chairlift.engine.cpu.attention.layer import DecodeCache, DecodeMask
from chairlift.engine.cpu.compiled.jobs import Program, ProgramChain
from chairlift.engine.cpu.compiled.row_attention import are_alike
from chairlift.engine.cpu.decoder.layer import HostDecoderLayer, LayerPrograms, is_plain
from chairlift.engine.cpu.host_linear import Products
from chairlift.engine.cpu.views import view
from chairlift.engine.model.trials.trial import Trial, elementwise

log = logging.getLogger(__name__)

_TRIAL = Trial(elementwise(1e-3), log, error="decoder layers are computed one by one: %s")


class DecoderStack:
    """The decoder layers of a model, in the order of their calls."""

    def __init__(self, layers: Sequence[HostDecoderLayer]) -> None:
        # A layer reads what the one before has written.
        for number, layer in enumerate(layers):
            layer.arrange(*(("even", "odd") if number % 2 == 0 else ("odd", "even")))
        self._layers = layers
        self._pending = _Pending()

    def begin(self) -> None:
        """Forgets what a call of the model that failed has left."""
        self._pending.clear()

    def take(
        self, number: int, x: mx.array, mask: DecodeMask, cache: DecodeCache
    ) -> mx.array | None:
        """Takes the call of a layer.

        Args:
            number: the layer's.
            x: ``[tokens, 1, inputs]``; what ``take`` has returned for the layer before, if it has.

        Returns:
            ``x``, or the outputs of the last layer; None if the layer cannot be computed with those
            before it: then ``flush`` gives its input.

        Raises:
            RuntimeError: something was computed from an input that this has returned.
        """
        pending = self._pending
        if pending.steps and x is not pending.x:
            self.begin()
            raise RuntimeError("the model computes something between its layers")
        layer = self._layers[number]
        step = layer.step(len(x))
        if step is None or step.jobs is None:
            return None
        if not pending.steps:
            begun = step.point(mask, cache)
            if begun is None:
                return None
            step.x[...] = view(x.astype(mx.float32)).reshape(len(x), -1)
            step.take_angles(cache)
            pending.begin(number, x, begun.places)
        else:
            first = pending.steps[0]
            assert first.jobs is not None
            taken = host_step(cache, mask)
            # NOTE: what differs between the layers that are computed at once is only where their
            # keys and values are.
            if (
                taken is None
                or step.jobs.form != first.jobs.form
                or step.attention.angle_settings != first.attention.angle_settings
                or not are_alike(pending.places[0], taken.places)
            ):
                return None
            pending.places.append(taken.places)
        pending.steps.append(step)
        return x if number + 1 < len(self._layers) else self.flush(x)

    def flush(self, x: mx.array) -> mx.array:
        """Computes the layers that were taken; returns their outputs, or ``x`` without any."""
        pending = self._pending
        if not pending.steps:
            return x
        chain = self._chain(len(pending.x))
        chain.prepare()
        jobs = pending.steps[0].jobs
        assert jobs is not None
        jobs.repeat(chain, pending.first, pending.places[1:])
        chain.run(pending.first, pending.first + len(pending.steps))
        result = pending.steps[-1].result
        pending.clear()
        # The array has its numbers already: a further operation on it would be evaluated later.
        return mx.array(np.ascontiguousarray(result)[:, None])

    def _chain(self, tokens: int) -> ProgramChain:
        chains = self._pending.chains
        if tokens not in chains:
            steps = [layer.programs(tokens) for layer in self._layers]
            chains[tokens] = ProgramChain([s.whole if s is not None else Program() for s in steps])
        return chains[tokens]


class _Pending(threading.local):
    """The calls that were taken in one thread, and its programs by numbers of tokens.

    Attributes:
        steps: those of the layers, and ``places`` where each writes its keys and values.
        first: the number of the first layer.
        x: its input.
    """

    def __init__(self) -> None:
        self.steps: list[LayerPrograms] = []
        self.places: list[HostPlaces] = []
        self.first = 0
        self.x = mx.array(0)
        self.chains: dict[int, ProgramChain] = {}

    def begin(self, first: int, x: mx.array, places: HostPlaces) -> None:
        """Begins with a layer."""
        self.first, self.x, self.places = first, x, [places]

    def clear(self) -> None:
        """Forgets the calls. MLX copies buffers that something still views."""
        self.steps.clear()
        self.places.clear()


def install(model: Any) -> bool:
    """Lets a model compute its decoder layers at once, if the host computes all of them.

    Returns:
        Whether some layers have programs, and a trial gives the same logits.
    """
    layers, hosts = _layers(model), _hosts(model)
    if len(layers) < 2 or len(hosts) < len(layers) or not any(map(_has_program, hosts)):
        return False
    expected = _TRIAL.attempt(lambda: decode_logits(model))
    if expected is None:
        return False
    stack = DecoderStack(hosts)
    classes = [type(layer) for layer in layers]
    for number, layer in enumerate(layers):
        _join(layer, stack, number)
    if _TRIAL.passes(lambda: expected, lambda: decode_logits(model)):
        return True
    for layer, original in zip(layers, classes, strict=True):
        layer.__class__ = original
    return False


def has_programs(model: Any) -> bool:
    """Whether the host computes all decoder layers by programs that contain attention."""
    hosts = _hosts(model)
    return len(hosts) == len(_layers(model)) > 0 and all(map(_has_program, hosts))


def _layers(model: Any) -> list[Any]:
    return list(getattr(model, "layers", ()))


def _hosts(model: Any) -> list[HostDecoderLayer]:
    found = [getattr(layer, "host", None) for layer in _layers(model)]
    return [host for host in found if isinstance(host, HostDecoderLayer)]


def _has_program(layer: HostDecoderLayer) -> bool:
    """Whether the programs of a layer contain its attention."""
    step = layer.step(1)
    return step is not None and step.jobs is not None


def _join(layer: Any, stack: DecoderStack, number: int) -> None:
    base: Any = type(layer)
    products: Products = layer.self_attn.q_proj.products

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **more: Any) -> mx.array:
        if number == 0:
            stack.begin()
        if not more and x.shape[1] == 1 and is_plain(cache) and products.takes(x):
            taken = stack.take(number, x, mask, cache)
            if taken is not None:
                return taken
            # Compute the layers before this one, which may begin the next call.
            x = stack.flush(x)
            taken = stack.take(number, x, mask, cache)
            if taken is not None:
                return taken
        result: mx.array = base.__call__(self, stack.flush(x), mask, cache, **more)
        return result

    layer.__class__ = type(base.__name__, (base,), {"__call__": call})


def decode_logits(model: Any) -> mx.array:
    """The logits of two decode steps of two rows."""
    batch = make_batch(model)
    prompt = mx.array([[1, 2, 3], [3, 1, 2]])
    for _ in range(len(prompt)):
        batch.join(columns=prompt.shape[1] + 2)
    with batch.step(prompt.shape[1]):
        mx.eval(model(prompt, cache=batch.layers))
    logits: list[mx.array] = []
    for tokens in (prompt[:, :1], prompt[:, 1:2]):
        with batch.step(1):
            logits.append(model(tokens, cache=batch.layers))
            mx.eval(logits[-1])
    return mx.stack(logits)
