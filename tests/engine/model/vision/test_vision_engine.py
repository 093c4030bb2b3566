"""Vision models, in the engine: batched tokens are those that mlx-vlm generates alone."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from support.engine.bench import Bench
from support.engine.drafts import verify_any
from support.engine.pages import HostPages
from support.vision.image_maker import ImageMaker
from support.vision.tiny_vision import (
    CONFIGS,
    solo_logprobs,
    solo_tokens,
    vision_model,
    vlm_model,
)

from chairlift.engine.messages import Abort, PromptImage, Resumed
from chairlift.engine.model import attention
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.trials.probe import probe
from chairlift.engine.model.vision.encoder import ImageEncoder
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.speculation.proposal import PredictionProposer

Prompt = tuple[list[int], tuple[PromptImage, ...]]

# In larger blocks, rows would not run out of memory in 40 steps.
pytestmark = pytest.mark.usefixtures("small_blocks")


@cache
def _model(model_type: str) -> VisionModel:
    model = vision_model(model_type, seed=3)
    attention.install(model)
    return model


@cache
def _alone(model_type: str) -> Any:
    return vlm_model(model_type, seed=3)


def _prompts(model_type: str, count: int, seed: int = 1) -> list[Prompt]:
    """Prompts with 0 to 3 images, some at the beginning, some of which return."""
    maker, drawn = ImageMaker(model_type), random.Random(seed)
    return [
        maker.prompt(
            seed * 100 + number,
            [drawn.choice([0, 1, 4, 20])] * (number % 4) + [drawn.choice([1, 3, 30])],
            repeat=drawn.randrange(4),
        )
        for number in range(count)
    ]


def _solo(model_type: str, prompt: Prompt, count: int) -> list[int]:
    return solo_tokens(_alone(model_type), *prompt, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "paged"),
    [*((each, False) for each in CONFIGS), ("gemma3", True), ("llava", True), ("mistral3", True)],
)
def test_batched_tokens_are_those_of_mlx_vlm_alone(model_type: str, paged: bool) -> None:
    """Requests arrive while others run; prompts take several chunks, and some leave early."""
    prompts = _prompts(model_type, 8)
    counts = [random.Random(i).randrange(1, 16) for i in range(8)]
    expected = [_solo(model_type, p, n) for p, n in zip(prompts, counts, strict=True)]
    kernels = HostPages() if paged else None
    # All pages are allocated, and cleared, at once: 16 MB of them hold all of the prompts.
    kv = 1 << 24 if paged else 1 << 30
    bench = Bench(_model(model_type), tokens=24, kv=kv, prefix=1 << 24, bands=2, kernels=kernels)
    assert isinstance(bench.core.pipeline.forward, PagedForward) == paged
    for i, ((prompt, images), count) in enumerate(zip(prompts, counts, strict=True)):
        bench.submit(str(i), prompt, count, reading={"images": images})
        for _ in range(i % 4):
            bench.step()
        if i % 5 == 4:
            bench.submit(f"leaves {i}", prompt, 50, reading={"images": images})
            bench.step()
            bench.core.abort(Abort(f"leaves {i}"))
    bench.drain()
    assert [bench.tokens(str(i)) for i in range(8)] == expected
    assert not len(bench.core.images)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CONFIGS)
def test_logprobs_are_those_of_mlx_vlm(model_type: str) -> None:
    prompt, images = ImageMaker(model_type).prompt(7, [5, 9, 4])
    bench = Bench(_model(model_type), tokens=16)
    bench.submit("beside", _prompts(model_type, 1, seed=9)[0][0], 20)
    bench.step()
    bench.submit("0", prompt, 6, reading={"images": images}, logprobs=0)
    bench.drain()
    chosen = [each.logprob for output in bench.outputs["0", 0] for each in output.logprobs or []]
    expected = solo_logprobs(_alone(model_type), prompt, images, bench.tokens("0"))
    assert len(chosen) == 6
    assert mx.allclose(mx.array(chosen), mx.array(expected), atol=1e-3).item()


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_images_change_the_tokens(model_type: str) -> None:
    maker, bench = ImageMaker(model_type), Bench(_model(model_type), prefix=1 << 24)
    for i in range(4):
        # The same text, and images of the same size.
        prompt, images = maker.prompt(1, [5, 5])
        other = maker.image(i)[1]
        places = images[0].places[: len(other.places)]
        if model_type == "qwen2_vl":
            prompt, images = maker.sized_prompt(1, i)
        else:
            images = (PromptImage(other.digest, places, other.arrays),)
        bench.submit(str(i), prompt, 12, reading={"images": images})
        bench.drain()
    assert len({tuple(bench.tokens(str(i))) for i in range(4)}) == 4


def test_a_cached_prefix_needs_neither_prompt_nor_image() -> None:
    # No embeddings are kept that no request needs.
    bench = Bench(_model("qwen2_vl"), prefix=1 << 24, image_bytes=1)
    prompt, images = ImageMaker("qwen2_vl").prompt(5, [6, 7, 5])
    bench.submit("first", prompt, 5, reading={"images": images})
    bench.drain()
    assert sum(len(stats.image_seconds) for stats in bench.stats) == 2
    assert bench.core.images.nbytes == 0
    steps = len(bench.stats)
    bench.submit("second", [*prompt, *bench.tokens("first"), 5, 6], 5, reading={"images": images})
    bench.drain()
    later = bench.stats[steps:]
    assert sum(len(stats.image_seconds) for stats in later) == 0
    assert sum(stats.image_hits for stats in later) == sum(s.image_queries for s in later) == 2
    assert sum(stats.prefix_hits for stats in later) >= len(prompt)
    longer = [*prompt, *bench.tokens("first"), 5, 6]
    assert bench.tokens("second") == _solo("qwen2_vl", (longer, images), 5)


def test_prompts_share_nothing_from_another_image_on() -> None:
    bench = Bench(_model("qwen2_vl"), prefix=1 << 24)
    maker = ImageMaker("qwen2_vl")
    prompts = [maker.sized_prompt(2, seed) for seed in range(3)]
    assert len({tuple(prompt) for prompt, _ in prompts}) == 1
    for i, (prompt, images) in enumerate(prompts):
        bench.submit(str(i), prompt, 8, reading={"images": images})
        bench.drain()
        cached = bench.outputs[str(i), 0][0].cached_tokens
        assert cached <= images[0].places[0]
    assert [bench.tokens(str(i)) for i in range(3)] == [_solo("qwen2_vl", p, 8) for p in prompts]


def test_an_image_is_encoded_once() -> None:
    bench = Bench(_model("llava"))
    maker = ImageMaker("llava")
    for i in range(4):
        prompt, images = maker.prompt(10 + i, [3 + i, 4], repeat=0)
        bench.submit(str(i), prompt, 4, reading={"images": images})
    bench.drain()
    assert sum(len(stats.image_seconds) for stats in bench.stats) == 1
    assert bench.stats[-1].image_bytes == 16 * 64 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "kv"), [("gemma3", 200), ("qwen2_vl", 400)])
@pytest.mark.parametrize("swap", [0, 1 << 24])
def test_preemption_changes_no_tokens(model_type: str, kv: int, swap: int) -> None:
    model = _model(model_type)
    prompts = _prompts(model_type, 6, seed=4)
    expected = [_solo(model_type, prompt, 40) for prompt in prompts]
    geometry = probe(model, "test").geometry
    # Every image that is needed again is encoded again.
    bench = Bench(model, kv=kv * geometry.bytes_per_token, swap=swap, image_bytes=1)
    assert bench.core.limits.max_context > 40 + max(len(prompt) for prompt, _ in prompts)
    for i, (prompt, images) in enumerate(prompts):
        bench.submit(str(i), prompt, 40, reading={"images": images})
    bench.drain()
    assert sum(stats.preemptions for stats in bench.stats) > 0
    assert [bench.tokens(str(i)) for i in range(6)] == expected


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"])
def test_another_engine_continues_a_request(model_type: str) -> None:
    prompt = ImageMaker(model_type).prompt(3, [4, 6, 5])
    expected = _solo(model_type, prompt, 12)
    bench = Bench(_model(model_type), tokens=16)
    resumed = (Resumed(0, expected[:5], 0, 0.0, 0.0, 0.0),)
    bench.submit("0", prompt[0], 12, reading={"images": prompt[1], "resumed": resumed})
    bench.drain()
    assert bench.tokens("0") == expected[5:]


def test_choices_share_their_images() -> None:
    prompt, images = ImageMaker("qwen2_vl").prompt(8, [4, 6])
    bench = Bench(_model("qwen2_vl"))
    bench.submit("0", prompt, 10, n=3, reading={"images": images})
    bench.drain()
    expected = _solo("qwen2_vl", (prompt, images), 10)
    assert [bench.tokens("0", index) for index in range(3)] == [expected] * 3


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_vl"])
def test_drafts_have_the_positions_of_their_rows(model_type: str) -> None:
    prompts = _prompts(model_type, 5, seed=6)
    expected = [_solo(model_type, prompt, 20) for prompt in prompts]
    bench = Bench(
        _model(model_type),
        draft=6,
        propose=lambda request: [PredictionProposer(request.prediction)],
    )
    verify_any(bench.core)
    for i, (prompt, images) in enumerate(prompts):
        reading: dict[str, Any] = {"images": images, "prediction": expected[i]}
        bench.submit(str(i), prompt, 20, reading=reading)
        bench.step()
    bench.drain()
    assert [bench.tokens(str(i)) for i in range(5)] == expected
    assert sum(stats.draft_tokens for stats in bench.stats) > 0


def test_requests_beyond_the_budget_wait_for_others() -> None:
    bench = Bench(_model("llava"), image_bytes=1)
    prompts = [ImageMaker("llava").prompt(20 + i, [3, 4, 5]) for i in range(4)]
    for i, (prompt, images) in enumerate(prompts):
        bench.submit(str(i), prompt, 6, reading={"images": images})
    bench.drain()
    assert [bench.tokens(str(i)) for i in range(4)] == [_solo("llava", p, 6) for p in prompts]
    assert max(stats.image_bytes for stats in bench.stats) == 2 * 16 * 64 * 4
    assert bench.core.images.nbytes == 0


def test_a_model_that_fails_on_an_image_fails_only_requests_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(_model("llava"))
    good, bad = (ImageMaker("llava").prompt(30 + i, [3, 4]) for i in range(2))
    stages = VisionModel.stages

    def failing(self: VisionModel, image: PromptImage, own: list[int]) -> list[mx.array]:
        if image.digest == bad[1][0].digest:
            raise ValueError("it does not fit")
        return stages(self, image, own)

    monkeypatch.setattr(VisionModel, "stages", failing)
    for name, (prompt, images) in (("bad", bad), ("good", good), ("bad, too", bad)):
        bench.submit(name, prompt, 6, reading={"images": images})
    bench.drain()
    assert bench.tokens("good") == _solo("llava", good, 6)
    for name in ("bad", "bad, too"):
        assert bench.outputs[name, 0][-1].finish == "error"
    assert not len(bench.core.images)


def test_an_image_that_nobody_waits_for_any_longer_takes_no_memory() -> None:
    encoder = ImageEncoder(_model("llava"), 1 << 20)
    prompt, images = ImageMaker("llava").prompt(50, [3, 4])
    before = mx.get_active_memory()
    for name in ("first", "second"):
        encoder.await_images(name, prompt, images, 0)
    encoder.encode(0.0)
    encoder.drop("first")
    assert encoder.is_awaited("second")
    pixels = len(images[0].arrays["pixel_values"].data)
    assert mx.get_active_memory() > before + pixels
    encoder.drop("second")
    assert mx.get_active_memory() < before + pixels


def test_an_image_is_encoded_between_steps_of_running_rows() -> None:
    bench = Bench(_model("llava"))
    bench.submit("runs", [5, 6, 7], 60)
    for _ in range(4):
        bench.step()
    prompts = [ImageMaker("llava").prompt(40 + i, [3, 4]) for i in range(3)]
    for i, (prompt, images) in enumerate(prompts):
        bench.submit(str(i), prompt, 4, reading={"images": images})
    before = len(bench.stats)
    bench.step()
    assert len(bench.stats[before].image_seconds) >= 1
    assert bench.stats[before].phases["encode"] > 0
    bench.drain()
    assert bench.tokens("runs") == _solo("llava", ([5, 6, 7], ()), 60)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CONFIGS)
def test_an_image_is_encoded_a_few_modules_at_a_time(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chairlift.engine.core.core.IDLE_SECONDS", 0.0)
    bench = Bench(_model(model_type))
    bench.submit("runs", [5, 6, 7], 40)
    for _ in range(3):
        bench.step()
    prompt, images = ImageMaker(model_type).prompt(50, [3, 4])
    bench.submit("0", prompt, 4, reading={"images": images})
    bench.submit("leaves", prompt, 4, reading={"images": images})
    before = len(bench.stats)
    bench.step()
    bench.core.abort(Abort("leaves"))
    bench.drain()
    encoding = [stats for stats in bench.stats[before:] if "encode" in stats.phases]
    # Two layers with attention, an MLP, and products in both, and the embeddings.
    assert len(encoding) > 10
    assert [len(stats.image_seconds) for stats in encoding] == [0] * (len(encoding) - 1) + [1]
    assert all(stats.rows for stats in encoding)
    assert bench.tokens("0") == _solo(model_type, (prompt, images), 4)
    assert bench.tokens("runs") == _solo(model_type, ([5, 6, 7], ()), 40)


def test_beside_a_prompt_an_image_has_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[tuple[bool, float]] = []
    encode = ImageEncoder.encode
    bench = Bench(_model("llava"), tokens=16)

    def timed(self: ImageEncoder, limit: float) -> float:
        seconds.append((bool(bench.core.scheduler.prefilling), limit))
        return encode(self, 0.0)

    monkeypatch.setattr(ImageEncoder, "encode", timed)
    monkeypatch.setattr("chairlift.engine.core.core.MAX_ENCODER_WAITS", 0)
    bench.submit("runs", [5, 6, 7], 80)
    for _ in range(3):
        bench.step()
    prompt, images = ImageMaker("llava").prompt(50, [3, 4])
    bench.submit("image", prompt, 4, reading={"images": images})
    bench.submit("text", [9] * 100, 4)
    bench.drain()
    assert {prompts for prompts, _ in seconds} == {False, True}
    assert all(limit == (0.05 if prompts else 0.1) for prompts, limit in seconds)
