"""Processors: texts with images become the tokens and embeddings of mlx-vlm's own path."""

from __future__ import annotations

import io
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from support.tiny import EOS_ID, SPECIALS
from support.vision.tiny_vision import numpy_of
from support.vision.vision_dir import MORE_PROCESSORS, PROCESSORS, picture, vision_dir
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from chairlift.engine.errors import ModelError, RequestError
from chairlift.engine.messages import ImagePrompt, ImageSource
from chairlift.engine.model.vision.loading import load_vision_model
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.model.vision.processing import processing_of
from chairlift.engine.model.vision.processor import Processor, load_processor, prepare

# Of mlx-vlm and transformers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values:UserWarning"),
    pytest.mark.filterwarnings("ignore:Image.Image.getdata is deprecated:DeprecationWarning"),
]
ALL = PROCESSORS | MORE_PROCESSORS
SIZES = [(40, 24), (20, 30), (16, 16), (64, 8)]
SEVERAL = [each for each in ALL if processing_of(each).most is None]
# Images of one prompt that mlx-vlm does not confuse: its GLM-4V lets the third and further ones see
# each other, and its Idefics 2 lets small images see their padding.
CONFUSED = {"glm4v": [0, 1, 3], "idefics2": [0, 0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def _loaded(folder: Path, model_type: str) -> tuple[Processor, VisionModel]:
    path = vision_dir(folder, model_type)
    return _processor(path, model_type), load_vision_model(path, model_type)


def _processor(path: Path, model_type: str) -> Processor:
    processor = load_processor(str(path), model_type, trust_remote_code=False)
    for name, value in ALL[model_type].attributes.items():
        setattr(processor._processor, name, value)
    return processor


def _text(model_type: str, images: int) -> str:
    # mlx-vlm's PaliGemma takes an image at the beginning of its prompt only.
    before = "" if model_type == "paligemma" else "Look: "
    return before + f"{ALL[model_type].mark} and " * images + "what?"


def _prepared(processor: Processor, text: str, seeds: list[int]) -> ImagePrompt:
    files = [picture(seed, *SIZES[seed]) for seed in seeds]
    return prepare(processor, text, [ImageSource(f, "image/png", "auto") for f in files])


def _assert_embeddings_are_those_of_mlx_vlm(
    processor: Processor, model: VisionModel, text: str, pictures: list[bytes]
) -> None:
    """Compares a prompt's tokens, and the embeddings of all its images."""
    from mlx_vlm.utils import prepare_inputs

    sources = [ImageSource(each, "image/png", "auto") for each in pictures]
    tokens, images = prepare(processor, text, sources)
    shown = [Image.open(io.BytesIO(each)).convert("RGB") for each in pictures]
    if model.model_type == "llava":
        # mlx-vlm's call of this processor fails with this version of transformers.
        inputs = dict(processor._processor(text=[text], images=shown))
    else:
        inputs = prepare_inputs(processor._processor, images=shown, prompts=text)
    ids, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values")
    mask = inputs.pop("attention_mask")
    embedded = model.model.get_input_embeddings(ids, pixels, mask=mask, **inputs)
    assert tokens == ids[0].tolist()
    first = 0
    for image in images:
        places = mx.array(image.places)
        added = _added(embedded.deepstack_visual_embeds, places, first)
        expected = mx.concatenate([embedded.inputs_embeds[0, places], *added], axis=-1)
        own = model.embeddings(image, tokens[image.span])
        assert mx.allclose(expected, own, atol=1e-4).item()
        first += len(image.places)


def _added(embeds: Any, places: mx.array, first: int) -> list[mx.array]:
    """What layers add to the tokens at these places, of which ``first`` images' tokens precede."""
    if embeds is None:
        return []
    embeds = getattr(embeds, "embeddings", embeds)
    if isinstance(embeds, list):
        return [each[first : first + places.size] for each in embeds]
    if embeds.ndim == 4:
        return [embeds[0, places, number] for number in range(embeds.shape[2])]
    return [each[places] for each in embeds]


@pytest.mark.parametrize("model_type", ALL)
@pytest.mark.parametrize("size", SIZES)
def test_embeddings_are_those_of_mlx_vlm(
    folder: Path, model_type: str, size: tuple[int, int]
) -> None:
    processor, model = _loaded(folder, model_type)
    pictures = [picture(SIZES.index(size), *size)]
    _assert_embeddings_are_those_of_mlx_vlm(processor, model, _text(model_type, 1), pictures)


@pytest.mark.parametrize("model_type", SEVERAL)
def test_embeddings_of_several_images_are_those_of_mlx_vlm(folder: Path, model_type: str) -> None:
    processor, model = _loaded(folder, model_type)
    seeds = CONFUSED.get(model_type, [0, 1, 0, 3])
    pictures = [picture(seed, *SIZES[seed]) for seed in seeds]
    text = _text(model_type, len(seeds))
    _assert_embeddings_are_those_of_mlx_vlm(processor, model, text, pictures)


@pytest.mark.parametrize("model_type", SEVERAL)
def test_several_images_are_each_as_alone(folder: Path, model_type: str) -> None:
    processor, _ = _loaded(folder, model_type)
    tokens, images = _prepared(processor, _text(model_type, 4), [0, 1, 0, 3])
    assert [image.digest for image in images].count(images[0].digest) == 2
    assert images[0].digest == images[2].digest
    last = -1
    for image, seed in zip(images, [0, 1, 0, 3], strict=True):
        alone_tokens, (alone,) = _prepared(processor, _text(model_type, 1), [seed])
        assert image.digest == alone.digest
        assert len(image.places) == len(alone.places)
        assert {tokens[place] for place in image.places} == {alone_tokens[alone.places[0]]}
        assert image.places[0] > last
        last = image.places[-1]
        for name, array in image.arrays.items():
            assert np.isfinite(numpy_of(array).astype(np.float64)).all(), name


@pytest.mark.parametrize("model_type", [each for each in ALL if each not in SEVERAL])
def test_a_type_that_takes_one_image(folder: Path, model_type: str) -> None:
    processor, _ = _loaded(folder, model_type)
    with pytest.raises(RequestError, match="a prompt of this model has at most 1 image"):
        _prepared(processor, _text(model_type, 2), [0, 0])


@pytest.mark.parametrize("model_type", ALL)
def test_a_tokenizer_adds_no_tokens_to_a_rendered_template(folder: Path, model_type: str) -> None:
    processor, _ = _loaded(folder, model_type)
    path = folder / f"tiny-{model_type}"
    copy = folder / "adding" / path.name
    shutil.copytree(path, copy, ignore=lambda *_: ["model.safetensors"])
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    first = (SPECIALS[EOS_ID], EOS_ID)
    tokenizer.post_processor = TemplateProcessing(f"{first[0]} $A", None, [first])
    tokenizer.save(str(copy / "tokenizer.json"))
    adding = _processor(copy, model_type)
    text = SPECIALS[EOS_ID] + _text(model_type, 1)
    assert _prepared(adding, text, [2]).tokens == _prepared(processor, text, [2]).tokens


@pytest.mark.parametrize("model_type", ["llama4", "step3p7"])
def test_an_image_in_tiles_with_itself_as_the_last(folder: Path, model_type: str) -> None:
    processor, model = _loaded(folder, model_type)
    text, pictures = _text(model_type, 1), [picture(0, 1024, 512)]
    image = prepare(processor, text, [ImageSource(pictures[0], None, "auto")]).images[0]
    tiles = sum(a.shape[0] for name, a in image.arrays.items() if name.endswith("pixel_values"))
    assert tiles == {"llama4": 3, "step3p7": 5}[model_type]
    _assert_embeddings_are_those_of_mlx_vlm(processor, model, text, pictures)


@pytest.mark.parametrize("model_type", ALL)
@pytest.mark.parametrize("marks", [0, 2])
def test_a_text_must_place_an_image(folder: Path, model_type: str, marks: int) -> None:
    processor, _ = _loaded(folder, model_type)
    with pytest.raises(RequestError, match=f"{marks} places for 1 images"):
        _prepared(processor, _text(model_type, marks), [0])


@pytest.mark.parametrize("marks", [0, 1, 3])
def test_a_text_must_place_each_image(folder: Path, marks: int) -> None:
    processor, _ = _loaded(folder, "qwen2_vl")
    text = "a<|image_pad|>" * marks
    sources = [ImageSource(picture(seed), None, "auto") for seed in range(2)]
    with pytest.raises(RequestError, match=f"{marks} places for 2 images"):
        prepare(processor, text, sources)


def test_a_processor_that_refuses_an_image(folder: Path) -> None:
    processor, _ = _loaded(folder, "qwen2_vl")
    # Qwen's processor refuses sides of very different length.
    sources = [ImageSource(picture(1, 900, 3), None, "auto")]
    with pytest.raises(RequestError, match=r"refuses the images: .*ratio"):
        prepare(processor, "<|image_pad|>", sources)


def test_a_folder_without_processor(tmp_path: Path) -> None:
    path = vision_dir(tmp_path, "gemma3")
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="the image processor cannot be loaded"):
        load_processor(str(path), "gemma3", trust_remote_code=False)
