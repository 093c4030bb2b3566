"""Replaces attention layers of known forms, and the decoder layers around them, for decode steps.

The replacements compute outside of MLX, from a layer's input to its output. In a small model rotary
embedding, attention and a dozen small operations of MLX take as long as the matrix products between
them. A layer is replaced only if a trial shows that the replacement computes the same.
"""

from __future__ import annotations

import logging
from typing import Any

from chairlift.engine.cpu.attention.layer import NORMS, PROJECTIONS, HostAttention
from chairlift.engine.cpu.compiled import row_attention
from chairlift.engine.cpu.decoder import layer as decoder_layer
from chairlift.engine.cpu.decoder import stack
from chairlift.engine.cpu.host_linear import LINEAR
from chairlift.engine.cpu.kernels import SharedRope
from chairlift.engine.model.attention import caps_scores
from chairlift.engine.model.trials.trial import Trial, within_rms

log = logging.getLogger(__name__)

_TRIAL = Trial(within_rms(1e-3), log, error="an attention layer is of another form: %s")


def install(model: Any) -> bool:
    """Replaces the layers whose attention has Llama's, Qwen's or Gemma's form, and whose products
    the host computes.

    Returns:
        Whether a kernel of the host reads the keys and values of all layers, also in float16.
    """
    layers = list(model.modules())
    count = sum(map(_replace, layers))
    if count:
        whole = decoder_layer.install(layers)
        at_once = "in one call" if stack.install(model) else "one by one"
        parts = "decode on the host: %d attention layers, %d decoder layers, %s"
        log.info(parts, count, whole, at_once)
    return stack.has_programs(model) and row_attention.reads_half()


def _replace(layer: Any) -> bool:
    children = layer.children()
    if not {*PROJECTIONS, "rope"} <= set(children) <= {*PROJECTIONS, *NORMS, "rope"}:
        return False
    projections = [children[name] for name in PROJECTIONS]
    if type(layer.rope) is not SharedRope or (NORMS[0] in children) != (NORMS[1] in children):
        return False
    if any(not isinstance(part, LINEAR) for part in projections):
        return False
    if caps_scores(layer):
        return False  # the scores of a trial are too small to tell
    if len({id(part.products) for part in projections[:3]}) > 1:
        return False  # they are quantized in different ways
    host = _TRIAL.attempt(lambda: HostAttention(layer))
    if host is None:
        return False
    return decoder_layer.replace(layer, host, _TRIAL)
