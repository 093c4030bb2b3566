"""Prompts with images: tokens and embeddings are those of mlx-vlm's own path, for all types."""

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
from support.engine.bench import Bench
from support.tiny import EOS_ID, SPECIALS
from support.vision.grid_processors import GRID_PROCESSORS
from support.vision.tile_processors import TILE_PROCESSORS
from support.vision.vision_dir import MORE_PROCESSORS, PROCESSORS, picture, vision_dir
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from chairlift.engine.errors import RequestError
from chairlift.engine.messages import ImagePrompt, ImageSource
from chairlift.engine.model import attention
from chairlift.engine.model.vision.families import Family, family_of
from chairlift.engine.model.vision.image_arrays import numpy_of
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
OWN = GRID_PROCESSORS | TILE_PROCESSORS
ALL = PROCESSORS | MORE_PROCESSORS | OWN
SIZES = [(40, 24), (20, 30), (16, 16), (64, 8)]
SEVERAL = [name for name in ALL if processing_of(name).most is None]
OWN_SEVERAL = [name for name in OWN if name in SEVERAL]
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
    marks = [ALL[model_type].mark.replace("{}", str(number + 1)) for number in range(images)]
    return "Look: " + "".join(f"{mark} and " for mark in marks) + "what?"


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


@pytest.mark.parametrize("model_type", OWN)
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


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in OWN if family_of(name) != Family()])
def test_an_engine_generates_the_tokens_of_mlx_vlm(folder: Path, model_type: str) -> None:
    """Of types whose tokens have positions, attention or additions of their own."""
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load_model, prepare_inputs

    processor, _ = _loaded(folder, model_type)
    path = folder / f"tiny-{model_type}"
    model = load_vision_model(path, model_type)
    attention.install(model)
    bench, expected = Bench(model, tokens=160, bands=2), []
    for seeds in [[0], [3, 1, 0]] if model_type in SEVERAL else [[0], [3]]:
        text = _text(model_type, len(seeds))
        tokens, images = _prepared(processor, text, seeds)
        bench.submit(str(len(expected)), tokens, 8, reading={"images": images})
        shown = [Image.open(io.BytesIO(picture(seed, *SIZES[seed]))) for seed in seeds]
        inputs = prepare_inputs(processor._processor, images=shown, prompts=text)
        names = ("input_ids", "pixel_values", "attention_mask")
        ids, pixels, mask = (inputs.pop(name) for name in names)
        # With a size, mlx-vlm's Zaya fails.
        settings = {"max_tokens": 8, "temperature": 0.0, "prefill_step_size": None}
        steps = generate_step(ids, load_model(path), pixels, mask, **settings, **inputs)
        expected.append([int(token) for token, _ in steps])
    bench.drain()
    assert [bench.tokens(str(number)) for number in range(len(expected))] == expected


@pytest.mark.parametrize("model_type", OWN_SEVERAL)
def test_several_images_are_each_as_alone(folder: Path, model_type: str) -> None:
    processor, _ = _loaded(folder, model_type)
    tokens, images = _prepared(processor, _text(model_type, 4), [0, 1, 0, 3])
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
    assert len({image.digest for image in images}) == 3


@pytest.mark.parametrize("model_type", [name for name in ALL if name not in SEVERAL])
def test_more_images_than_mlx_vlm_takes_are_refused(folder: Path, model_type: str) -> None:
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


@pytest.mark.parametrize("model_type", ALL)
def test_a_text_must_not_contain_the_token_of_an_embedding(folder: Path, model_type: str) -> None:
    processor, _ = _loaded(folder, model_type)
    text = _text(model_type, 1) + ALL[model_type].token
    with pytest.raises(RequestError, match="a text must not contain"):
        _prepared(processor, text, [0])


def test_numbered_marks_are_in_order(folder: Path) -> None:
    processor, _ = _loaded(folder, "locateanything")
    with pytest.raises(RequestError, match="2 places for 2 images"):
        _prepared(processor, "<image-2> and <image-1>", [0, 1])


@pytest.mark.parametrize(
    "model_type", ["cohere_compass", "glm5_next", "kimi_k25", "kimi_k3", "locateanything"]
)
def test_a_processor_for_pixels_as_mlx_vlm_would_replace_it(folder: Path, model_type: str) -> None:
    """mlx-vlm's ``load`` takes one without the folder's settings, which has the published ones."""
    from mlx_vlm.utils import load_image_processor

    processor, _ = _loaded(folder, model_type)
    other = _processor(folder / f"tiny-{model_type}", model_type)
    other._processor.image_processor = load_image_processor(folder / f"tiny-{model_type}")
    for seed in range(len(SIZES)):
        text = _text(model_type, 1)
        assert _prepared(other, text, [seed]) == _prepared(processor, text, [seed])
