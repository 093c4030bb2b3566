"""The smallest slice of ``make conformance-vision``: one type for each way to call mlx-vlm."""

from __future__ import annotations

import random

import numpy as np
import pytest
from conformance.vision.check import TOP, Solo, check, difference
from conformance.vision.configs import tiny_model
from conformance.vision.forms import Prompt, random_prompt
from conformance.vision.types import NOT_APPLICABLE, NOT_TRIED, TYPES, type_names
from support.engine.bench import Bench
from support.vision.tiny_vision import numpy_of

from chairlift.engine.messages import Array, PromptImage
from chairlift.engine.model import attention
from chairlift.engine.model.vision.families import FAMILIES
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.speculation.proposal import PredictionProposer


def _served(model_type: str) -> VisionModel:
    model = VisionModel(tiny_model(model_type), model_type)
    attention.install(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    [
        "gemma4",
        "glm5_next",
        "granite4_vision",
        "lfm2_vl",
        "minicpmo",
        "minimax_m3_vl",
        "molmo",
        "phi4_siglip",
    ],
)
def test_batched_tokens_are_those_of_mlx_vlm_alone(model_type: str) -> None:
    result = check(model_type, seeds=(0,))
    assert result.outcome == "passed", result


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm5_next", "kimi_k3", "qwen3_5"])
def test_accelerated_recurrent_layers_give_the_same_tokens(model_type: str) -> None:
    result = check(model_type, seeds=(1,))
    assert result.outcome == "passed", result


def test_each_type_is_checked_or_left_out_for_a_reason() -> None:
    assert set(type_names()) == TYPES.keys() | NOT_APPLICABLE.keys() | NOT_TRIED.keys()
    assert not TYPES.keys() & (NOT_APPLICABLE.keys() | NOT_TRIED.keys())
    assert FAMILIES.keys() <= TYPES.keys()


def test_recurrent_states_after_a_wrong_draft_have_the_positions_of_their_row() -> None:
    form = TYPES["qwen3_5"].form
    # Its images have fewer positions than tokens.
    prompt = random_prompt(form, random.Random(5), 2, [1, 2, 3])
    solo = Solo(tiny_model("qwen3_5"), form, prompt, 16)
    bench = Bench(
        _served("qwen3_5"),
        draft=6,
        propose=lambda request: [PredictionProposer(request.prediction)],
    )
    # The draft is wrong after a few tokens.
    wrong = [token if number % 5 else 7 for number, token in enumerate(solo.tokens, 1)]
    reading = {"images": prompt.images, "prediction": wrong}
    bench.submit("0", prompt.tokens, 16, reading=reading, logprobs=TOP)
    bench.drain()
    assert difference(bench, "0", solo) is None
    assert sum(stats.draft_tokens for stats in bench.stats) > 0


@pytest.mark.slow
def test_a_reply_that_saw_a_window_is_no_prefix_of_the_next_prompt() -> None:
    form = TYPES["unlimited_ocr"].form
    model = tiny_model("unlimited_ocr")
    bench = Bench(_served("unlimited_ocr"), prefix=1 << 24)
    prompt = random_prompt(form, random.Random(0), 0, [])
    for turn in range(2):
        solo = Solo(model, form, prompt, 12)
        bench.submit(str(turn), prompt.tokens, 12, logprobs=TOP)
        bench.drain()
        assert difference(bench, str(turn), solo) is None
        tokens = [*prompt.tokens, *solo.tokens, 5, 6, 7]
        prompt = Prompt(tokens, (), tokens, {})


def test_an_image_that_must_be_whole_and_is_too_long_is_refused() -> None:
    form = TYPES["gemma4"].form
    prompt = random_prompt(form, random.Random(0), 1, [1])
    bench = Bench(_served("gemma4"), rows=6, tokens=9)
    bench.submit("0", prompt.tokens, 4, reading={"images": prompt.images})
    bench.drain()
    assert bench.outputs["0", 0][-1].finish == "error"
    error = str(bench.outputs["0", 0][-1].error)
    assert error.startswith("an image has 4 tokens, which have to be in one step")
    assert "a step computes 3" in error
    assert not len(bench.core.images)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("gemma4_unified", "image_position_ids"),
        ("molmo", "image_input_idx"),
        ("molmo2", "image_token_pooling"),
        ("moondream3", "num_crops"),
    ],
)
def test_indices_beyond_what_they_index_are_refused(model_type: str, name: str) -> None:
    prompt = random_prompt(TYPES[model_type].form, random.Random(0), 1, [1])
    (image,) = prompt.images
    one = Array("int64", (1,), np.ones(1, np.int64).tobytes())
    indices = numpy_of(image.arrays.get(name, one)) + 1_000_000
    bad = Array(str(indices.dtype), indices.shape, indices.tobytes())
    images = (PromptImage(image.digest, image.places, {**image.arrays, name: bad}),)
    bench = Bench(_served(model_type))
    bench.submit("0", prompt.tokens, 4, reading={"images": images})
    bench.drain()
    assert bench.outputs["0", 0][-1].finish == "error"
