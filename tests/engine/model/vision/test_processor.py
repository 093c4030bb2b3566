"""Processors: texts with images become the tokens and embeddings of mlx-vlm's own path."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from support.vision.tiny_vision import numpy_of
from support.vision.vision_dir import MORE_PROCESSORS, PROCESSORS, picture, vision_dir

from chairlift.engine.errors import ModelError, RequestError
from chairlift.engine.messages import ImagePrompt, ImageSource
from chairlift.engine.model.vision.loading import load_vision_model
from chairlift.engine.model.vision.processing import processing_of
from chairlift.engine.model.vision.processor import Processor, load_processor, prepare

ALL = PROCESSORS | MORE_PROCESSORS
SIZES = [(40, 24), (20, 30), (16, 16), (64, 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def _loaded(folder: Path, model_type: str) -> tuple[Path, Processor]:
    path = vision_dir(folder, model_type)
    return path, load_processor(str(path), model_type, trust_remote_code=False)


def _prepared(
    processor: Processor, mark: str, seeds: list[int], before: str = "Look: "
) -> tuple[str, ImagePrompt]:
    text = before + "".join(f"{mark} and " for _ in seeds) + "what?"
    files = [picture(seed, *SIZES[seed % len(SIZES)]) for seed in seeds]
    return text, prepare(processor, text, [ImageSource(f, "image/png", "auto") for f in files])


@pytest.mark.parametrize("model_type", ALL)
@pytest.mark.parametrize("size", SIZES)
def test_embeddings_are_those_of_mlx_vlm(
    folder: Path, model_type: str, size: tuple[int, int]
) -> None:
    from mlx_vlm.utils import prepare_inputs

    path, processor = _loaded(folder, model_type)
    # mlx-vlm's PaliGemma takes an image at the beginning of its prompt only.
    before = "" if model_type == "paligemma" else "Look: "
    seeds = [SIZES.index(size)]
    text, (tokens, (image,)) = _prepared(processor, ALL[model_type].mark, seeds, before)
    model = load_vision_model(path, model_type)
    own = model.embeddings(image, tokens[image.span])
    if model_type == "llava":
        # mlx-vlm's call of this processor fails with this version of transformers.
        inputs = dict(processor._processor(text=[text], images=[_image(size)]))
    else:
        inputs = prepare_inputs(
            processor._processor, images=[_image(size)], prompts=text, add_special_tokens=False
        )
    ids, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values")
    mask = inputs.pop("attention_mask")
    embedded = model.model.get_input_embeddings(ids, pixels, mask=mask, **inputs)
    expected = [embedded.inputs_embeds[0, mx.array(image.places)]]
    expected += embedded.deepstack_visual_embeds or []
    assert tokens == ids[0].tolist()
    assert mx.allclose(mx.concatenate(expected, axis=-1), own, atol=1e-4).item()


def _image(size: tuple[int, int]) -> Image.Image:
    return Image.open(io.BytesIO(picture(SIZES.index(size), *size))).convert("RGB")


@pytest.mark.parametrize("model_type", [n for n in ALL if processing_of(n).most is None])
def test_several_images_are_each_as_alone(folder: Path, model_type: str) -> None:
    _, processor = _loaded(folder, model_type)
    mark = ALL[model_type].mark
    _, (tokens, images) = _prepared(processor, mark, [0, 1, 0, 3])
    assert [image.digest for image in images].count(images[0].digest) == 2
    assert images[0].digest == images[2].digest
    last = -1
    for image, seed in zip(images, [0, 1, 0, 3], strict=True):
        _, (alone_tokens, (alone,)) = _prepared(processor, mark, [seed])
        assert image.digest == alone.digest
        assert len(image.places) == len(alone.places)
        assert {tokens[place] for place in image.places} == {alone_tokens[alone.places[0]]}
        assert image.places[0] > last
        last = image.places[-1]
        for name, array in image.arrays.items():
            assert np.isfinite(numpy_of(array).astype(np.float64)).all(), name


@pytest.mark.parametrize("marks", [0, 1, 3])
def test_a_text_must_place_each_image(folder: Path, marks: int) -> None:
    _, processor = _loaded(folder, "qwen2_vl")
    text = "a<|image_pad|>" * marks
    sources = [ImageSource(picture(seed), None, "auto") for seed in range(2)]
    with pytest.raises(RequestError, match=f"{marks} places for 2 images"):
        prepare(processor, text, sources)


def test_a_processor_that_refuses_an_image(folder: Path) -> None:
    _, processor = _loaded(folder, "qwen2_vl")
    # Qwen's processor refuses sides of very different length.
    sources = [ImageSource(picture(1, 900, 3), None, "auto")]
    with pytest.raises(RequestError, match=r"refuses the images: .*ratio"):
        prepare(processor, "<|image_pad|>", sources)


def test_a_folder_without_processor(tmp_path: Path) -> None:
    path = vision_dir(tmp_path, "gemma3")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="the image processor cannot be loaded"):
        load_processor(str(path), "gemma3", trust_remote_code=False)
