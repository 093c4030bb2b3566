"""The check of one type: requests with images have the same tokens in the engine as alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from support.engine.bench import Bench

from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.messages import Abort
from chairlift.engine.model import attention
from chairlift.engine.model.vision.families import FAMILIES
from chairlift.engine.model.vision.model import VisionModel
from conformance.check import Result, where
from conformance.restored import restored
from conformance.vision.configs import tiny_model
from conformance.vision.forms import Form, Prompt, random_prompt
from conformance.vision.types import NOT_APPLICABLE, NOT_TRIED, TYPES

TOLERANCE = 1e-3
REQUESTS = 8
# A window is 12 tokens; a chunk that is not a multiple of it.
CHUNK = 20
# More than the tokens of a prompt that has to be in one chunk.
WHOLE = 160
TOP = 5


class Solo:
    """mlx-vlm's greedy tokens of a prompt alone, and the log-probabilities of each step."""

    def __init__(self, model: Any, form: Form, prompt: Prompt, count: int) -> None:
        steps = list(_steps(model, form, prompt, count))
        self.tokens = [token for token, _ in steps]
        self.logprobs = [logprobs for _, logprobs in steps]


def check(name: str, seeds: tuple[int, ...] = (0, 1)) -> Result:
    """Runs one type alone and in the engine on the CPU, once for each seed."""
    if name in NOT_APPLICABLE:
        return Result(name, "not applicable", "", NOT_APPLICABLE[name])
    with mx.stream(mx.cpu):
        return _check(name, seeds)


def _check(name: str, seeds: tuple[int, ...]) -> Result:
    if name in NOT_TRIED:
        return Result(name, "failed", "", NOT_TRIED[name])
    if name not in TYPES:
        return Result(name, "failed", "", "not looked at yet")
    form = TYPES[name].form
    try:
        model = tiny_model(name)
        unfit = _unfit_for_comparison(model, form)
    except Exception as error:
        unfit = where(error)
    if unfit:
        return Result(name, "failed", "", f"mlx-vlm alone: {unfit}")
    if name not in FAMILIES:
        return Result(name, "failed", "", "not supported yet")
    caches = ""
    try:
        for seed in seeds:
            requests = _requests(model, form, seed)
            engine = VisionModel(tiny_model(name), name)
            caches = _cache_names(engine)
            with restored():
                # Every other time as the engine serves it on this device.
                if seed % 2:
                    eager = accelerate(engine.model.language_model).eager
                else:
                    eager = False
                    attention.install(engine)
                different = _compare(engine, eager, form, requests, seed)
            if different:
                return Result(name, "failed", caches, different)
    except Exception as error:
        return Result(name, "failed", caches, where(error))
    note = "at most one image in a prompt" if form.most == 1 else ""
    return Result(name, "passed", caches, note)


def _unfit_for_comparison(model: Any, form: Form) -> str | None:
    """Why a model's own logits cannot serve as a reference; None if they can."""
    prompt = random_prompt(form, random.Random(0), 1, [1])
    other = random_prompt(form, random.Random(0), 1, [2])
    first, second = (Solo(model, form, each, 4).logprobs[0] for each in (prompt, other))
    if not np.isfinite(first).all():
        return "its logits are not numbers"
    if np.abs(first - second).max() < 20 * TOLERANCE:
        return "its images do not matter"
    texts = [random_prompt(form, random.Random(seed), 0, []) for seed in range(4)]
    said = {token for text in texts for token in Solo(model, form, text, 4).tokens}
    return "it says fewer than four tokens" if len(said) < 4 else None


def _requests(model: Any, form: Form, seed: int) -> list[tuple[Prompt, Solo]]:
    """Prompts, and their tokens alone."""
    draw, seeds = random.Random(seed), [10 * seed + number for number in range(5)]
    prompts = [
        random_prompt(form, draw, min(number % 4, form.most), seeds) for number in range(REQUESTS)
    ]
    return [(prompt, Solo(model, form, prompt, draw.randrange(2, 12))) for prompt in prompts]


def _compare(
    engine: VisionModel,
    eager: bool,
    form: Form,
    requests: list[tuple[Prompt, Solo]],
    seed: int,
) -> str | None:
    """The first difference between requests that join and leave, and each alone."""
    draw = random.Random(seed)
    tokens = WHOLE if form.whole else CHUNK
    bench = Bench(engine, eager=eager, rows=6, tokens=tokens, prefix=1 << 24, bands=2)
    for number, (prompt, solo) in enumerate(requests):
        reading, count = {"images": prompt.images}, len(solo.tokens)
        bench.submit(str(number), prompt.tokens, count, reading=reading, logprobs=TOP)
        for _ in range(draw.randrange(4)):
            bench.step()
        if number % 4 == 3:
            bench.submit(f"leaves {number}", prompt.tokens, 50, reading=reading)
            bench.step()
            bench.core.abort(Abort(f"leaves {number}"))
    bench.drain()
    for number, (prompt, solo) in enumerate(requests):
        if different := difference(bench, str(number), solo):
            return f"request {number} with {len(prompt.images)} images: {different}"
    return None


def difference(bench: Bench, name: str, solo: Solo) -> str | None:
    """The first difference of a request with ``TOP`` log-probabilities and the same alone."""
    outputs = bench.outputs[name, 0]
    if error := next((o.error for o in outputs if o.error), None):
        return str(error)
    said = [each for output in outputs for each in output.logprobs or []]
    for place, (token, one, theirs) in enumerate(
        zip(bench.tokens(name), said, solo.logprobs, strict=False)
    ):
        ours = dict([(token, one.logprob), *one.top])
        error = max(abs(float(theirs[t]) - logprob) for t, logprob in ours.items())
        if not error <= TOLERANCE:
            return f"log-probabilities of token {place} differ by {error:.1g}"
        if token != solo.tokens[place]:
            best, second = (float(theirs[t]) for t in (solo.tokens[place], token))
            if best - second > TOLERANCE:
                return f"token {place} differs"
            return None  # two tokens are equally likely
    if len(bench.tokens(name)) != len(solo.tokens):
        return f"{len(bench.tokens(name))} tokens instead of {len(solo.tokens)}"
    return None


def _steps(model: Any, form: Form, prompt: Prompt, count: int) -> Iterator[tuple[int, np.ndarray]]:
    from mlx.utils import tree_map
    from mlx_vlm.generate.ar import generate_step

    tokens = mx.array([prompt.theirs])
    arrays = form.records(tree_map(mx.array, prompt.arrays))
    pixels = arrays.pop("pixel_values", None)
    mask = mx.ones(tokens.shape, mx.int32)
    # NOTE: where a text sets none, mlx-vlm would use those of the prompt before.
    if hasattr(model.language_model, "_rope_deltas"):
        model.language_model._rope_deltas = None
    if form.unchunked:
        arrays["prefill_step_size"] = None
    steps = generate_step(tokens, model, pixels, mask, max_tokens=count, temperature=0.0, **arrays)
    for token, logprobs in steps:
        yield int(token), np.array(logprobs.astype(mx.float32)).reshape(-1)


def _cache_names(engine: VisionModel) -> str:
    counts = Counter(type(cache).__name__ for cache in engine.make_cache())
    return ", ".join(f"{count} {name}" for name, count in counts.items())
