"""Tokens of a prompt that see each other: all of it, or an image and what is in front of it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from conformance.vision.check import TOP, WHOLE, Solo, check, difference
from conformance.vision.configs import tiny_model
from conformance.vision.forms import Prompt, random_prompt
from conformance.vision.tiny import Tiny
from conformance.vision.types import TYPES
from support.engine.bench import Bench

from chairlift.engine.messages import PromptImage
from chairlift.engine.messages.images import prompt_keys
from chairlift.engine.model import attention
from chairlift.engine.model.trials.probe import probe
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.speculation.proposal import PredictionProposer

WHOLE_FORM = TYPES["paligemma"].form
# PaliGemma 2: its attention is computed by the model file, in float32.
GEMMA2 = {
    "model_type": "gemma2",
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


# In larger blocks, rows would not run out of memory in 40 steps.
pytestmark = pytest.mark.usefixtures("small_blocks")


@cache
def _alone(model_type: str) -> Any:
    return tiny_model(model_type)


@cache
def _served(model_type: str) -> VisionModel:
    model = VisionModel(tiny_model(model_type), model_type)
    attention.install(model)
    return model


def _prompt(seed: int, images: int = 1, model_type: str = "paligemma") -> Prompt:
    return random_prompt(TYPES[model_type].form, random.Random(seed), images, [seed])


def _solo(prompt: Prompt, count: int, model_type: str = "paligemma") -> Solo:
    return Solo(_alone(model_type), TYPES[model_type].form, prompt, count)


def _submit(bench: Bench, name: str, prompt: Prompt, count: int, n: int = 1) -> None:
    bench.submit(name, prompt.tokens, count, n, reading={"images": prompt.images}, logprobs=TOP)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["falcon_ocr", "paligemma"])
def test_batched_tokens_are_those_of_mlx_vlm_alone(model_type: str) -> None:
    result = check(model_type, seeds=(1,))
    assert result.outcome == "passed", result


def test_an_attention_of_the_models_own_sees_the_whole_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {**TYPES["paligemma"].config, "text_config": GEMMA2}
    monkeypatch.setitem(TYPES, "paligemma", Tiny(WHOLE_FORM, config))
    prompt, text = _prompt(2), _prompt(3, images=0)
    model = VisionModel(tiny_model("paligemma"), "paligemma")
    attention.install(model)
    bench = Bench(model, tokens=WHOLE)
    # Other chunks of this length would be computed in several calls.
    bench.core.pipeline.forward._max_pairs = 40
    _submit(bench, "0", prompt, 8)
    _submit(bench, "1", text, 8)
    bench.drain()
    alone = tiny_model("paligemma")
    for name, each in (("0", prompt), ("1", text)):
        assert difference(bench, name, Solo(alone, WHOLE_FORM, each, 8)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "swap"), [("falcon_ocr", 0), ("paligemma", 0), ("paligemma", 1 << 24)]
)
def test_preempted_prompts_are_whole_again_and_their_output_is_not(
    model_type: str, swap: int
) -> None:
    prompts = [_prompt(seed, model_type=model_type) for seed in range(6)]
    model = _served(model_type)
    kv = 180 * probe(model, "test").geometry.bytes_per_token
    bench = Bench(model, tokens=WHOLE, kv=kv, swap=swap, image_bytes=1)
    for number, prompt in enumerate(prompts):
        _submit(bench, str(number), prompt, 40)
    bench.drain()
    assert sum(stats.preemptions for stats in bench.stats) > 0
    for number, prompt in enumerate(prompts):
        assert difference(bench, str(number), _solo(prompt, 40, model_type)) is None


def test_a_whole_prompt_neither_takes_a_prefix_nor_leaves_one() -> None:
    prompt = _prompt(4, images=0)
    longer = replace(prompt, tokens=[*prompt.tokens, 5, 6, 7], theirs=[*prompt.theirs, 5, 6, 7])
    bench = Bench(_served("paligemma"), tokens=WHOLE, prefix=1 << 24)
    for name, each in (("0", prompt), ("1", longer), ("2", prompt)):
        _submit(bench, name, each, 6)
        bench.drain()
        assert difference(bench, name, _solo(each, 6)) is None
    assert bench.core.prefixes.nbytes == 0
    assert sum(stats.prefix_queries for stats in bench.stats) == 0


@pytest.mark.parametrize("model_type", ["falcon_ocr", "paligemma"])
def test_choices_and_drafts_follow_an_image(model_type: str) -> None:
    prompt = _prompt(5, model_type=model_type)
    solo = _solo(prompt, 12, model_type)
    bench = Bench(
        _served(model_type),
        tokens=WHOLE,
        draft=4,
        propose=lambda request: [PredictionProposer(request.prediction)],
    )
    # The draft is wrong after a few tokens.
    wrong = [token if number % 5 else 7 for number, token in enumerate(solo.tokens, 1)]
    reading = {"images": prompt.images, "prediction": wrong}
    bench.submit("drafts", prompt.tokens, 12, reading=reading, logprobs=TOP)
    bench.drain()
    _submit(bench, "choices", prompt, 12, n=3)
    bench.drain()
    assert difference(bench, "drafts", solo) is None
    assert sum(stats.draft_tokens for stats in bench.stats) > 0
    assert [bench.tokens("choices", index) for index in range(3)] == [solo.tokens] * 3


def test_a_whole_prompt_that_is_too_long_is_refused() -> None:
    bench = Bench(_served("paligemma"), rows=6, tokens=20)
    bench.submit("0", [5] * 15, 4)
    bench.submit("1", [5] * 14, 4, reading={"prompt_logprobs": 1})
    bench.submit("2", [5] * 14, 4)
    bench.drain()
    refused = [bench.outputs[name, 0][-1] for name in ("0", "1")]
    assert str(refused[0].error).startswith("the prompt has 15 tokens")
    assert "a step computes 14" in str(refused[0].error)
    assert str(refused[1].error).startswith("prompt_logprobs: ")
    assert all(each.client_error for each in refused)
    assert len(bench.tokens("2")) == 4
    assert not len(bench.core.images)


def test_a_prefix_does_not_end_in_front_of_another_image() -> None:
    form = TYPES["falcon_ocr"].form
    bench = Bench(_served("falcon_ocr"), rows=6, tokens=60, prefix=1 << 24)
    # The same text, and images of other pixels.
    for seed in range(4):
        prompt = random_prompt(form, random.Random(1), 1, [seed])
        _submit(bench, str(seed), prompt, 6)
        bench.drain()
        assert difference(bench, str(seed), _solo(prompt, 6, "falcon_ocr")) is None


def test_tokens_in_front_of_an_image_that_see_it_have_its_keys() -> None:
    images = (PromptImage(b"a", [4, 5], {}), PromptImage(b"b", [9], {}))
    prompt = list(range(10, 21))
    plain = prompt_keys(prompt, images)
    assert [place for place, key in enumerate(plain) if key < 0] == [4, 5, 9]
    keys = prompt_keys(prompt, images, (range(2, 6), range(8, 10)))
    assert [place for place, key in enumerate(keys) if key < 0] == [2, 3, 4, 5, 8, 9]
    other = prompt_keys(prompt, (PromptImage(b"c", [4, 5], {}), images[1]), (range(2, 6),))
    assert keys[2] != other[2]
    assert keys[9] != keys[8]
