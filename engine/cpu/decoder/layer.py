"""Computes a decoder layer of few tokens in NumPy: norms, attention, MLP and the sums between.

Between the layers' products, each of MLX's evaluations costs more than what it computes. A layer is
replaced only if a trial shows that the replacement computes the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from chairlift.cache.batch import BatchCache
from chairlift.cache.layer import LayerCache
from chairlift.cache.packed.host_step import HostStep, host_step
from chairlift.cache.packed.step import PackedLayer
from chairlift.cache.quantized import HalfLayer
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.cpu.attention.layer import (
    DecodeCache,
    DecodeMask,
    HostAttention,
    Projected,
)
from chairlift.engine.cpu.compiled.jobs import NoProgramError, Program
from chairlift.engine.cpu.compiled.row_attention import AttentionJobs
from chairlift.engine.cpu.elementwise import HostNorm
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.host_linear import Products
from chairlift.engine.cpu.host_mlp import HostMlp
from chairlift.engine.cpu.program_builder import ProgramBuilder
from chairlift.engine.cpu.views import view
from chairlift.engine.model.trials.trial import Trial, elementwise

log = logging.getLogger(__name__)

# Steps of more tokens take so long that the calls from Python do not matter. Each number of tokens
# has programs of its own.
MAX_TOKENS = 64
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
# Gemma's layers have a norm before and after each part.
_GEMMA_PARTS = _PARTS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_TRIAL = Trial(elementwise(1e-3), log, error="a decoder layer is of another form: %s")
# Rows, and tokens of each before the decode step of a trial.
_TRIAL_ROWS, _TRIAL_TOKENS = 2, 3


class HostDecode(Protocol):
    """A layer's decode step in NumPy."""

    def __call__(self, x: Floats, mask: DecodeMask, cache: DecodeCache) -> Floats:
        """``[tokens, inputs]`` → ``[tokens, outputs]``; the next call may overwrite the result.

        With a ``LayerCache`` there is one token for each row.
        """
        ...


class HostDecoderLayer:
    """See ``HostDecode``. A program computes the layer for few tokens.

    Args:
        layer: its attention and its MLP have been replaced.
        inputs: the numbers of a token.
    """

    def __init__(self, layer: Any, inputs: int) -> None:
        self._attention: HostAttention = layer.self_attn.host
        self._mlp: HostMlp = layer.mlp.host
        self._inputs = inputs
        after = HostNorm(layer.post_attention_layernorm, inputs)
        self._before_attention = HostNorm(layer.input_layernorm, inputs)
        self._after_attention: HostNorm | None = None
        self._before_mlp = after
        self._after_mlp: HostNorm | None = None
        if set(layer.children()) == _GEMMA_PARTS:
            self._after_attention = after
            self._before_mlp = HostNorm(layer.pre_feedforward_layernorm, inputs)
            self._after_mlp = HostNorm(layer.post_feedforward_layernorm, inputs)
        self._programs = _Programs()
        self._names = "x", "middle"

    def arrange(self, read: str, write: str) -> None:
        """Sets the names of the arrays that programs read and write; see ``ProgramBuilder``."""
        self._names = read, write
        self._programs = _Programs()

    def __call__(self, x: Floats, mask: DecodeMask, cache: DecodeCache) -> Floats:
        """See ``HostDecode``."""
        if (step := self.step(len(x))) is not None:
            return step(x, mask, cache)
        part = self._attention(self._before_attention(x), mask, cache)
        middle: Floats = x + (self._after_attention(part) if self._after_attention else part)
        part = self._mlp(self._before_mlp(middle))
        middle += self._after_mlp(part) if self._after_mlp else part
        return middle

    def step(self, tokens: int) -> LayerPrograms | None:
        """The programs for some tokens; None if one call at a time has to compute the layer."""
        products = *self._attention.products, *self._mlp.products
        return self.programs(tokens) if all(each.is_plain for each in products) else None

    def programs(self, tokens: int) -> LayerPrograms | None:
        """The programs for some tokens, which do not compute additions; None: there are none."""
        if tokens > MAX_TOKENS:
            return None
        steps = self._programs.steps
        if tokens not in steps:
            try:
                steps[tokens] = self._build(tokens)
            except NoProgramError:
                steps[tokens] = None
        return steps[tokens]

    def _build(self, tokens: int) -> LayerPrograms:
        before, after = ProgramBuilder(), ProgramBuilder()
        read, write = self._names
        x = before.array(read, tokens, self._inputs)
        normed = before.array("normed", tokens, self._inputs)
        projected = self._attention.build_before(
            before, self._before_attention.build(before, x, normed)
        )
        mixed = after.array("mixed", *projected.queries.shape)
        part = self._attention.build_after(after, mixed.reshape(tokens, -1))
        if self._after_attention is not None:
            part = self._after_attention.build(after, part, part)
        middle = after.sum(x, part, after.array(write, tokens, self._inputs))
        part = self._mlp.build(after, self._before_mlp.build(after, middle, normed))
        if self._after_mlp is not None:
            part = self._after_mlp.build(after, part, part)
        after.sum(middle, part, middle)
        whole = ProgramBuilder()
        whole.program.extend(before.program)
        try:
            attention = self._attention.build_attention(whole, projected, mixed)
        except NoProgramError:
            attention = None
        whole.program.extend(after.program)
        programs = before.program, after.program, whole.program
        return LayerPrograms(self._attention, x, projected, mixed, middle, *programs, attention)


class LayerPrograms(NamedTuple):
    """The programs of a layer for a number of tokens, and the arrays that they share.

    Attributes:
        before, after: compute what comes before and after attention.
        whole: computes the layer.
        jobs: those of attention in ``whole``; None if there is no kernel for its heads.
    """

    attention: HostAttention
    x: Floats
    projected: Projected
    mixed: Floats
    result: Floats
    before: Program
    after: Program
    whole: Program
    jobs: AttentionJobs | None

    def __call__(self, x: Floats, mask: DecodeMask, cache: DecodeCache) -> Floats:
        """See ``HostDecode``."""
        projected = self.projected
        self.x[...] = x
        self.take_angles(cache)
        if self.point(mask, cache) is not None:
            self.whole.run()
            return self.result
        self.before.run()
        arrays = projected.queries, projected.keys, projected.values
        self.mixed[...] = self.attention.attend(*arrays, mask, cache)
        self.after.run()
        return self.result

    def take_angles(self, cache: DecodeCache) -> None:
        """Takes the angles of a step's positions."""
        projected = self.projected
        projected.cosines[...], projected.sines[...] = self.attention.angles(cache)

    def point(self, mask: DecodeMask, cache: DecodeCache) -> HostStep | None:
        """Sets where ``whole`` writes and reads keys and values; None if it cannot."""
        step = None if self.jobs is None else host_step(cache, mask)
        if self.jobs is None or step is None or not self.jobs.point(step):
            return None
        return step


class _Programs(threading.local):
    """A layer's compiled steps by number of tokens, for each thread: steps share memory."""

    def __init__(self) -> None:
        self.steps: dict[int, LayerPrograms | None] = {}


def install(layers: Sequence[Any]) -> int:
    """Replaces decoder layers; returns how many were."""
    return sum(map(_replace, layers))


def _replace(layer: Any) -> bool:
    if set(layer.children()) not in (_PARTS, _GEMMA_PARTS):
        return False
    if not (hasattr(layer.self_attn, "host") and hasattr(layer.mlp, "host")):
        return False
    inputs = layer.self_attn.o_proj.products.matrix.stops[-1]
    host = _TRIAL.attempt(lambda: HostDecoderLayer(layer, inputs))
    return host is not None and replace(layer, host, _TRIAL)


def replace(layer: Any, host: HostDecode, trial: Trial) -> bool:
    """Gives a layer of ``(x, mask, cache)`` a decode step, if a trial gives the same.

    ``layer.host`` is that step.
    """
    base: Any = type(layer)
    attention = layer if "q_proj" in layer.children() else layer.self_attn
    products: Products = attention.q_proj.products

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **more: Any) -> mx.array:
        supported = is_plain(cache) and not more and x.shape[1] == 1 and products.takes(x)
        result: mx.array = (
            _decoded(self.host, x, mask, cache)
            if supported
            else base.__call__(self, x, mask, cache, **more)
        )
        return result

    inputs = attention.o_proj.products.matrix.stops[-1]
    prompt, token = (
        mx.random.normal((_TRIAL_ROWS, n, inputs), key=mx.random.key(n)) for n in (_TRIAL_TOKENS, 1)
    )

    def step(decode: Any) -> mx.array:
        batch = BatchCache([LayerKind(None)])
        cache = batch.layers[0]
        for _ in range(_TRIAL_ROWS):
            batch.join(columns=_TRIAL_TOKENS + 1)
        with batch.step(_TRIAL_TOKENS):
            mx.eval(layer(prompt, cache.make_mask(_TRIAL_TOKENS), cache))
        with batch.step(1):
            result: mx.array = decode(token, cache.make_mask(1), cache)
            mx.eval(result)
        return result

    if not trial.passes(lambda: step(layer), lambda: step(lambda *of: _decoded(host, *of))):
        return False
    layer.__class__ = type(base.__name__, (base,), {"__call__": call})
    layer.host = host
    return True


def is_plain(cache: Any) -> bool:
    """Whether a cache has whole keys and values, so that the host can read them."""
    layers = cache.layers if isinstance(cache, PackedLayer) else [cache]
    return all(type(layer) in (LayerCache, HalfLayer) for layer in layers)


def _decoded(host: HostDecode, x: mx.array, mask: DecodeMask, cache: DecodeCache) -> mx.array:
    values = view(x.astype(mx.float32)).reshape(len(x), -1)
    # The array has its numbers already: a further operation on it would be evaluated later.
    return mx.array(np.ascontiguousarray(host(values, mask, cache))[:, None])
