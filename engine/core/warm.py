"""Warm-up steps, so that the first request is as fast as the next.

An accelerator compiles each kernel when it is first called. On a CPU the first products take a
second longer, because the BLAS sets itself up.
"""

from __future__ import annotations

import gc
from dataclasses import replace

from chairlift.cache.pages.budget import PROMPTS
from chairlift.engine.core.core import EngineCore
from chairlift.engine.core.prepared_model import PreparedModel
from chairlift.engine.messages import SamplingParams, Submit, Thinking
from chairlift.scheduler.limits import Limits

# The rows and tokens for which a warming engine's caches have room.
_ROWS, _TOKENS = 4, 4096

_ALL_PARAMETERS = SamplingParams(
    max_tokens=4,
    seed=0,
    temperature=0.8,
    top_k=8,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    logprobs=1,
    stop_token_ids=(0,),
    min_tokens=1,
)
_GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0)
_SHORT = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
_CONSTRAINED = SamplingParams(max_tokens=4, seed=0, thinking=Thinking(end=(0,), budget=1))


def warm_model(model: PreparedModel, limits: Limits, kernels: bool) -> None:
    """Serves short requests with an engine of its own, whose caches are small; see ``warm``."""
    limits = model.adapt_limits(limits)
    rows = min(limits.max_rows, _ROWS)
    little = rows * limits.bytes_alone(_TOKENS) + (rows + PROMPTS) * limits.geometry.row_bytes
    small = replace(limits, max_rows=rows, kv_bytes=min(limits.kv_bytes, little))
    warm(EngineCore(model, small), kernels)
    if kernels:
        # The engine refers to itself, so its pages are in use until they are collected.
        gc.collect()


def warm(core: EngineCore, kernels: bool) -> None:
    """Serves a short request. Do not use the core afterwards.

    Args:
        kernels: serves a few requests instead, with every kind of sampling. They join and leave in
            different steps, alone and beside others.
    """
    requests = (_GREEDY, _ALL_PARAMETERS, _GREEDY, _CONSTRAINED) if kernels else (_SHORT,)
    for number, params in enumerate(requests):
        core.submit(Submit(str(number), [1, 0] * (1 + number), params))
        core.step()
    while not core.idle:
        core.step()
