"""The check of one model file over pages, on the device that MLX computes on."""

from __future__ import annotations

import random
import traceback
from typing import Any

import mlx.core as mx
from support.engine.core import build_core
from support.engine.pages import HostPages
from support.engine.reference import solo_tokens

from chairlift.cache.kinds import make_batch
from chairlift.cache.pages.memory import can_page
from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.core.core import EngineCore
from chairlift.engine.device import profile
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.trials.probe import probe
from chairlift.scheduler.limits import Limits
from conformance.check import Result
from conformance.configs import reason_not_applicable
from conformance.values import VOCAB, widen
from conformance.weights import tiny_model

REQUESTS, ROWS, STEP_TOKENS = 12, 6, 48


def check_paged(name: str) -> Result:
    """Serves random requests from pages, and compares their tokens with those of each alone.

    Not applicable: the model is served from columns, because its layers cache something else than
    keys and values, or because its logits over pages are others.
    """
    widen()
    if reason := reason_not_applicable(name):
        return Result(name, "not applicable", detail=reason)
    try:
        return _check(name)
    except Exception as error:  # a model file may raise anything
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__} in {where.name}: {error}"
        return Result(name, "failed", detail=" ".join(detail.split())[:200])


def _check(name: str) -> Result:
    requests = _requests()
    with mx.stream(mx.cpu):  # a GPU gives other tokens for some models
        alone = tiny_model(name)
        expected = {key: solo_tokens(alone, *request) for key, request in requests.items()}
    model = tiny_model(name)
    adapt(model)
    if not can_page(make_batch(model).kinds):
        return Result(name, "not applicable", detail="its layers cache something else")
    core = _core(model, name)
    if not isinstance(core.pipeline.forward, PagedForward):
        return Result(name, "not applicable", detail="its logits over pages are others")
    tokens = _serve(core, requests)
    wrong = [key for key in requests if tokens[key] != expected[key]]
    if wrong:
        return Result(name, "failed", "pages", f"other tokens for {len(wrong)} of {REQUESTS}")
    return Result(name, "passed", "pages")


def _core(model: Any, name: str) -> EngineCore:
    if profile.current().on_cpu:
        attention.install(model)
        kernels: Any = HostPages()
    else:
        kernels = accelerate(model).pages
    geometry, vocabulary, _ = probe(model, name)
    return build_core(
        model, vocabulary, Limits(ROWS, STEP_TOKENS, 1 << 26, geometry), kernels=kernels
    )


def _requests() -> dict[str, tuple[list[int], int]]:
    """Prompts and numbers of tokens to generate."""
    rng = random.Random(0)
    return {
        str(number): (
            [rng.randrange(1, VOCAB) for _ in range(rng.choice([1, 5, 30, 70, 130]))],
            rng.randrange(1, 16),
        )
        for number in range(REQUESTS)
    }


def _serve(core: EngineCore, requests: dict[str, tuple[list[int], int]]) -> dict[str, list[int]]:
    """The tokens of requests that come in different steps."""
    tokens: dict[str, list[int]] = {key: [] for key in requests}
    waiting = list(requests.items())
    while waiting or not core.idle:
        for key, (prompt, count) in waiting[:2]:
            params = SamplingParams(max_tokens=count, seed=0, temperature=0.0)
            core.submit(Submit(key, prompt, params))
        del waiting[:2]
        for output in core.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            tokens[output.request_id] += output.token_ids
    return tokens
