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
from support.engine.bench import Bench
from support.vision.special_processors import SPECIAL_PROCESSORS
from support.vision.vision_dir import picture, vision_dir
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from chairlift.engine.errors import ModelError, RequestError
from chairlift.engine.messages import ImagePrompt, ImageSource
from chairlift.engine.model import attention
from chairlift.engine.model.vision.loading import load_vision_model
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.model.vision.processing import processing_of
from chairlift.engine.model.vision.processor import Processor, load_processor, prepare

# transformers warns of a field that configs of its older versions have.
pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")
SIZES = [(40, 24), (20, 30), (16, 16), (64, 8)]
ONE_IMAGE = [name for name in SPECIAL_PROCESSORS if processing_of(name).most == 1]
PLACED = [name for name, files in SPECIAL_PROCESSORS.items() if files.mark]
SEVERAL = [name for name in SPECIAL_PROCESSORS if name not in ONE_IMAGE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def _loaded(folder: Path, model_type: str) -> tuple[Path, Processor, VisionModel]:
    path = vision_dir(folder, model_type)
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


def _their_inputs(path: Path, model: Any, text: str, seeds: list[int]) -> dict[str, Any]:
    """What mlx-vlm's own path makes of a text with images."""
    from mlx_vlm.utils import prepare_inputs

    inputs: dict[str, Any] = prepare_inputs(
        _theirs(path),
        images=[_image(seed) for seed in seeds],
        prompts=text,
        image_token_index=getattr(model.config, "image_token_index", None),
    )
    return inputs


@pytest.mark.parametrize("model_type", SPECIAL_PROCESSORS)
@pytest.mark.parametrize("seed", range(len(SIZES)))
def test_embeddings_are_those_of_mlx_vlm(folder: Path, model_type: str, seed: int) -> None:
    path, processor, model = _loaded(folder, model_type)
    text = _text(model_type, 1)
    tokens, (image,) = _prepared(processor, text, [seed])
    own = model.embeddings(image, tokens[image.span])
    inputs = _their_inputs(path, model.model, text, [seed])
    ids, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values")
    mask = inputs.pop("attention_mask")
    embedded = model.model.get_input_embeddings(ids, pixels, mask=mask, **inputs)
    # Outside of the image, the same tokens: prompts that an image makes longer are so here, too.
    expected = model.model.get_input_embeddings(mx.array([tokens])).inputs_embeds
    places, width = mx.array(image.places), expected.shape[-1]
    expected[0, places] = own[:, :width]
    assert embedded.inputs_embeds.shape == expected.shape
    assert mx.allclose(embedded.inputs_embeds, expected, atol=1e-4).item()
    if embedded.pos_hw is not None:
        assert mx.array_equal(embedded.pos_hw[0, places], own[:, width:]).item()


def test_positions_are_those_of_the_processor(folder: Path) -> None:
    path, processor, model = _loaded(folder, "hunyuan_vl")
    text = _text("hunyuan_vl", 1)
    tokens, images = _prepared(processor, text, [0])
    positions = _theirs(path)(text=[text], images=[_image(0)])["position_ids"][0]
    shifts = model.shifts(tokens, images)
    assert shifts is not None
    assert (shifts + np.arange(len(tokens))).tolist() == positions.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SPECIAL_PROCESSORS)
def test_an_engine_generates_the_tokens_of_mlx_vlm(folder: Path, model_type: str) -> None:
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load_model

    path, processor, _ = _loaded(folder, model_type)
    seeds = [0] if model_type in ONE_IMAGE else [0, 1]
    text = _text(model_type, len(seeds))
    tokens, images = _prepared(processor, text, seeds)
    alone = load_model(path)
    inputs = _their_inputs(path, alone, text, seeds)
    first = (inputs.pop("input_ids"), alone, inputs.pop("pixel_values"))
    mask = inputs.pop("attention_mask")
    steps = generate_step(*first, mask, max_tokens=6, temperature=0.0, **inputs)
    expected = [int(token) for token, _ in steps]
    model = load_vision_model(path, model_type)
    attention.install(model)
    bench = Bench(model, tokens=1024)
    bench.submit("0", tokens, 6, reading={"images": images})
    bench.drain()
    assert bench.tokens("0") == expected


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
    with pytest.raises(RequestError, match=r"at most 1 image$"):
        _prepared(processor, _text(model_type, 2), [0, 1])


def test_several_images_that_get_fewer_tiles_than_each_alone(tmp_path: Path) -> None:
    path = vision_dir(tmp_path, "plamo2vl")
    settings = json.loads((path / "preprocessor_config.json").read_bytes())
    settings["tile_context_length"] = 100
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    processor = load_processor(str(path), "plamo2vl", trust_remote_code=False)
    _prepared(processor, "What?", [0])
    with pytest.raises(RequestError, match=r"makes \d+ image tokens of these images together"):
        _prepared(processor, "What?", [0, 1])


@pytest.mark.parametrize("model_type", PLACED)
def test_a_text_must_place_each_image(folder: Path, model_type: str) -> None:
    _, processor, _ = _loaded(folder, model_type)
    for marks in (0, 2):
        with pytest.raises(RequestError, match=f"{marks} places for 1 images"):
            _prepared(processor, _text(model_type, marks), [0])


@pytest.mark.parametrize(
    ("model_type", "part"),
    [
        ("deepseek_v41", SPECIAL_PROCESSORS["deepseek_v41"].token),
        ("falcon_ocr", "<|image|>"),
        ("got", "<image>"),
        ("got", "<imgpad>"),
        ("jina_vlm", "<im_patch>"),
        ("plamo2vl", "<plamo:image>"),
    ],
)
def test_a_text_with_what_stands_for_an_image(folder: Path, model_type: str, part: str) -> None:
    _, processor, _ = _loaded(folder, model_type)
    with pytest.raises(RequestError, match="a text must not contain"):
        _prepared(processor, _text(model_type, 1) + part, [0])


@pytest.mark.parametrize("trusted", [False, True])
def test_a_folder_has_code(tmp_path: Path, trusted: bool) -> None:
    path = vision_dir(tmp_path, "got")
    # mlx-vlm's processor of this type trusts all code.
    settings = json.loads((path / "tokenizer_config.json").read_bytes())
    settings["tokenizer_class"] = "OwnTokenizer"
    settings["auto_map"] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    if trusted:
        processor = load_processor(str(path), "got", trust_remote_code=True)
        assert type(processor._processor.tokenizer).__name__ == "OwnTokenizer"
    else:
        with pytest.raises(ModelError, match="has code, which --trust-remote-code runs"):
            load_processor(str(path), "got", trust_remote_code=False)


@pytest.mark.parametrize("model_type", ["llava_bunny", "llava_next"])
def test_a_tokenizer_adds_no_special_tokens(tmp_path: Path, model_type: str) -> None:
    path = vision_dir(tmp_path, model_type)
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
    path = vision_dir(tmp_path, "llava_next")
    config = json.loads((path / "config.json").read_bytes())
    config["vision_config"]["image_size"] = 32
    (path / "config.json").write_text(json.dumps(config))
    processor = load_processor(str(path), "llava_next", trust_remote_code=False)
    with pytest.raises(RequestError, match="refuses the images"):
        _prepared(processor, _text("llava_next", 1), [2])
