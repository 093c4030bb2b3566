"""Types prepared in ways of their own: their prompts have the embeddings of mlx-vlm's own path."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from support.vision.special_processors import SPECIAL_PROCESSORS
from support.vision.vision_dir import picture, vision_dir
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from chairlift.engine.errors import RequestError
from chairlift.engine.messages import ImagePrompt, ImageSource
from chairlift.engine.model.vision.loading import load_vision_model
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.model.vision.processing import processing_of
from chairlift.engine.model.vision.processor import Processor, load_processor, prepare

# transformers warns of a field that configs of its older versions have.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
SIZES = [(40, 24), (20, 30), (16, 16), (64, 8)]
ONE_IMAGE = [name for name in SPECIAL_PROCESSORS if processing_of(name).most == 1]
SEVERAL = [name for name in SPECIAL_PROCESSORS if name not in ONE_IMAGE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def _loaded(folder: Path, model_type: str) -> tuple[Path, Processor, VisionModel]:
    path = vision_dir(folder, model_type, files=SPECIAL_PROCESSORS[model_type])
    processor = load_processor(str(path), model_type, trust_remote_code=False)
    return path, processor, load_vision_model(path, model_type)


@cache
def _theirs(path: Path) -> Any:
    """The processor as mlx-vlm loads it."""
    from mlx_vlm.utils import load_image_processor, load_processor

    processor = load_processor(path, trust_remote_code=False)
    if (pixels := load_image_processor(path)) is not None:
        processor.image_processor = pixels
    return processor


def _text(model_type: str, images: int) -> str:
    mark = SPECIAL_PROCESSORS[model_type].mark
    return "Look: " + f"{mark} and " * images + "what?"


def _prepared(processor: Processor, text: str, seeds: list[int]) -> ImagePrompt:
    files = [picture(seed, *SIZES[seed % len(SIZES)]) for seed in seeds]
    return prepare(processor, text, [ImageSource(file, "image/png", "auto") for file in files])


def _image(seed: int) -> Image.Image:
    return Image.open(io.BytesIO(picture(seed, *SIZES[seed]))).convert("RGB")


@pytest.mark.parametrize("model_type", SPECIAL_PROCESSORS)
@pytest.mark.parametrize("seed", range(len(SIZES)))
def test_embeddings_are_those_of_mlx_vlm(folder: Path, model_type: str, seed: int) -> None:
    from mlx_vlm.utils import prepare_inputs

    path, processor, model = _loaded(folder, model_type)
    text = _text(model_type, 1)
    tokens, (image,) = _prepared(processor, text, [seed])
    own = model.embeddings(image, tokens[image.span])
    inputs = prepare_inputs(
        _theirs(path),
        images=[_image(seed)],
        prompts=text,
        image_token_index=getattr(model.model.config, "image_token_index", None),
    )
    ids, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values")
    mask = inputs.pop("attention_mask")
    embedded = model.model.get_input_embeddings(ids, pixels, mask=mask, **inputs).inputs_embeds
    # Outside of the image, the same tokens: prompts that an image makes longer are so here, too.
    plain = model.model.get_input_embeddings(mx.array([tokens])).inputs_embeds
    places = mx.array(image.places)
    plain[0, places] = own
    assert embedded.shape == plain.shape
    assert mx.allclose(embedded, plain, atol=1e-4).item()


def test_positions_are_those_of_the_processor(folder: Path) -> None:
    path, processor, model = _loaded(folder, "hunyuan_vl")
    text = _text("hunyuan_vl", 1)
    tokens, images = _prepared(processor, text, [0])
    positions = _theirs(path)(text=[text], images=[_image(0)])["position_ids"][0]
    shifts = model.shifts(tokens, images)
    assert shifts is not None
    assert (shifts + np.arange(len(tokens))).tolist() == positions.tolist()


@pytest.mark.parametrize("model_type", SEVERAL)
def test_several_images_are_each_as_alone(folder: Path, model_type: str) -> None:
    _, processor, _ = _loaded(folder, model_type)
    seeds = [0, 1, 0, 3]
    tokens, images = _prepared(processor, _text(model_type, len(seeds)), seeds)
    assert images[0].digest == images[2].digest
    last = -1
    for image, seed in zip(images, seeds, strict=True):
        alone_tokens, (alone,) = _prepared(processor, _text(model_type, 1), [seed])
        assert image.digest == alone.digest
        assert tokens[image.span] == alone_tokens[alone.span]
        assert image.places[0] > last
        last = image.places[-1]


@pytest.mark.parametrize("model_type", ONE_IMAGE)
def test_more_images_than_mlx_vlm_takes(folder: Path, model_type: str) -> None:
    _, processor, _ = _loaded(folder, model_type)
    with pytest.raises(RequestError, match="at most 1 image in a conversation, not 2"):
        _prepared(processor, _text(model_type, 2), [0, 1])


@pytest.mark.parametrize("model_type", SPECIAL_PROCESSORS)
def test_a_text_must_place_each_image(folder: Path, model_type: str) -> None:
    _, processor, _ = _loaded(folder, model_type)
    for marks in (0, 2):
        with pytest.raises(RequestError, match=f"{marks} places for 1 images"):
            _prepared(processor, _text(model_type, marks), [0])


@pytest.mark.parametrize("model_type", ["llava_bunny", "llava_next"])
def test_a_tokenizer_adds_no_special_tokens(tmp_path: Path, model_type: str) -> None:
    path = vision_dir(tmp_path, model_type, files=SPECIAL_PROCESSORS[model_type])
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    begin = "<|im_start|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    processor = load_processor(str(path), model_type, trust_remote_code=False)
    tokens, _ = _prepared(processor, _text(model_type, 1), [2])
    assert tokenizer.token_to_id(begin) not in tokens


def test_a_model_that_cannot_take_what_the_processor_makes(tmp_path: Path) -> None:
    path = vision_dir(tmp_path, "llava_next", files=SPECIAL_PROCESSORS["llava_next"])
    config = json.loads((path / "config.json").read_bytes())
    config["vision_config"]["image_size"] = 32
    (path / "config.json").write_text(json.dumps(config))
    processor = load_processor(str(path), "llava_next", trust_remote_code=False)
    with pytest.raises(RequestError, match="refuses the images"):
        _prepared(processor, _text("llava_next", 1), [2])
