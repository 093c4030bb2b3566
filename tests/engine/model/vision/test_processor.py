"""Processors: texts with images become the tokens and embeddings of mlx-vlm's own path."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from PIL import Image
from support.engine.bench import Bench
from support.vision.tiled_processors import TILED_PROCESSORS
from support.vision.vision_dir import ALL_PROCESSORS, picture, vision_dir

from chairlift.engine.errors import ModelError, RequestError
from chairlift.engine.messages import ImagePrompt, ImageSource
from chairlift.engine.model import attention
from chairlift.engine.model.vision.image_arrays import mlx_of
from chairlift.engine.model.vision.loading import load_vision_model
from chairlift.engine.model.vision.model import VisionModel
from chairlift.engine.model.vision.processing import processing_of
from chairlift.engine.model.vision.processor import Processor, load_processor, prepare

SIZED = [(name, size) for name, files in ALL_PROCESSORS.items() for size in files.sizes]
ONE_IMAGE = [name for name in ALL_PROCESSORS if processing_of(name).most == 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def _loaded(folder: Path, model_type: str) -> tuple[Path, Processor]:
    path = vision_dir(folder, model_type)
    return path, load_processor(str(path), model_type, trust_remote_code=False)


@cache
def _model(path: Path, model_type: str) -> VisionModel:
    return load_vision_model(path, model_type)


def _prepared(
    folder: Path, model_type: str, numbers: list[int], before: str = "Look: "
) -> tuple[str, ImagePrompt]:
    """A text, and its prompt with images of these numbers; equal ones are the same image."""
    _, processor = _loaded(folder, model_type)
    mark = ALL_PROCESSORS[model_type].mark
    marks = [mark.replace("{}", str(place)) for place in range(1, len(numbers) + 1)]
    text = before + "".join(f"{mark} and " for mark in marks) + "what?"
    files = _pictures(model_type, numbers)
    sources = [ImageSource(each, "image/png", "auto") for each in files]
    return text, prepare(processor, text, sources)


def _pictures(model_type: str, numbers: list[int]) -> list[bytes]:
    sizes = ALL_PROCESSORS[model_type].sizes
    return [picture(number, *sizes[number % len(sizes)]) for number in numbers]


@pytest.mark.filterwarnings("ignore")  # mlx-vlm's code warns
@pytest.mark.parametrize(("model_type", "size"), SIZED)
def test_embeddings_are_those_of_mlx_vlm(
    folder: Path, model_type: str, size: tuple[int, int]
) -> None:
    path, processor = _loaded(folder, model_type)
    number = ALL_PROCESSORS[model_type].sizes.index(size)
    # mlx-vlm's PaliGemma takes an image at the beginning of its prompt only.
    before = "" if model_type == "paligemma" else "Look: "
    text, (tokens, (image,)) = _prepared(folder, model_type, [number], before)
    model = _model(path, model_type)
    own = model.embeddings(image, tokens[image.span])
    ids, arguments = _theirs(processor, model_type, text, [number])
    embedded = model.model.get_input_embeddings(ids, **arguments)
    expected = [embedded.inputs_embeds[0, mx.array(image.places)]]
    expected += embedded.deepstack_visual_embeds or []
    assert embedded.inputs_embeds.shape[1] == len(tokens)
    theirs = ids[0].tolist()
    if min(theirs) < 0:  # one for each image, or tokens that are no text's
        places = set(image.places)
        tokens = [token for place, token in enumerate(tokens) if place not in places]
        theirs = [token for token in theirs if token >= 0]
    assert tokens == theirs
    assert mx.allclose(mx.concatenate(expected, axis=-1), own, atol=1e-4).item()


def _theirs(
    processor: Processor, model_type: str, text: str, numbers: list[int]
) -> tuple[mx.array, dict[str, Any]]:
    """The tokens and the other arguments of mlx-vlm's own path."""
    from mlx_vlm.utils import prepare_inputs

    files = [io.BytesIO(each) for each in _pictures(model_type, numbers)]
    images = [Image.open(file).convert("RGB") for file in files]
    if model_type == "llava":
        # mlx-vlm's call of this processor fails with this version of transformers.
        inputs = dict(processor._processor(text=[text], images=images))
    else:
        settings = {"add_special_tokens": False, **processing_of(model_type).settings}
        inputs = prepare_inputs(processor._processor, images=images, prompts=text, **settings)
    if model_type == "deepseek_vl_v2":
        # mlx-vlm's code reads beyond this array.
        crops, pixels = inputs["images_spatial_crop"], inputs["pixel_values"]
        more = pixels.shape[1] - crops.shape[1]
        inputs["images_spatial_crop"] = mx.pad(crops, [(0, 0), (0, more), (0, 0)])
    mask = inputs.pop("attention_mask", None)
    return mx.array(inputs.pop("input_ids")), {**inputs, "mask": mask}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", TILED_PROCESSORS)
def test_an_engine_generates_the_tokens_of_mlx_vlm(folder: Path, model_type: str) -> None:
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load_model

    path, processor = _loaded(folder, model_type)
    numbers = [0, 1, 2][: processing_of(model_type).most]
    text, (tokens, images) = _prepared(folder, model_type, numbers)
    ids, arguments = _theirs(processor, model_type, text, numbers)
    pixels, mask = arguments.pop("pixel_values"), arguments.pop("mask")
    steps = generate_step(
        *(ids, load_model(path), pixels, mask), max_tokens=6, temperature=0.0, **arguments
    )
    expected = [int(token) for token, _ in steps]
    model = load_vision_model(path, model_type)
    attention.install(model)
    bench = Bench(model, tokens=64)
    bench.submit("0", tokens, 6, reading={"images": images})
    bench.drain()
    assert bench.tokens("0") == expected


@pytest.mark.parametrize("model_type", [n for n in ALL_PROCESSORS if n not in ONE_IMAGE])
def test_several_images_are_each_as_alone(folder: Path, model_type: str) -> None:
    processing = processing_of(model_type)
    numbers = [0, 1, 0][: processing.most or processing.tiled]
    _, (tokens, images) = _prepared(folder, model_type, numbers)
    last = -1
    for image, number in zip(images, numbers, strict=True):
        _, (alone_tokens, (alone,)) = _prepared(folder, model_type, [number])
        assert image.digest == alone.digest
        assert len(image.places) == len(alone.places)
        assert {tokens[place] for place in image.places} == {alone_tokens[alone.places[0]]}
        assert image.places[0] > last
        last = image.places[-1]
        for name, array in image.arrays.items():
            assert mx.isfinite(mlx_of(array).astype(mx.float32)).all().item(), name
    assert len({image.digest for image in images}) == len(set(numbers))


@pytest.mark.parametrize("model_type", ONE_IMAGE)
def test_of_some_types_a_prompt_has_one_image(folder: Path, model_type: str) -> None:
    with pytest.raises(RequestError, match=r"a prompt of this model has at most 1 image$"):
        _prepared(folder, model_type, [0, 1])


@pytest.mark.parametrize("model_type", ALL_PROCESSORS)
def test_a_text_has_no_mark_or_token_of_its_own(folder: Path, model_type: str) -> None:
    _, processor = _loaded(folder, model_type)
    mark = processor.mark.numbered(1)
    source = ImageSource(picture(0, 60, 40), None, "auto")
    for own in {mark, processor._token} - {"", None}:
        with pytest.raises(RequestError, match="a text must not contain"):
            prepare(processor, f"{mark} and {own}", [source])


@pytest.mark.parametrize("marks", [0, 1, 3])
def test_a_text_must_place_each_image(folder: Path, marks: int) -> None:
    _, processor = _loaded(folder, "qwen2_vl")
    text = "a<|image_pad|>" * marks
    sources = [ImageSource(picture(seed), None, "auto") for seed in range(2)]
    with pytest.raises(RequestError, match=f"{marks} places for 2 images"):
        prepare(processor, text, sources)


def test_numbers_of_marks_are_in_order(folder: Path) -> None:
    _, processor = _loaded(folder, "phi3_v")
    sources = [ImageSource(picture(number), None, "auto") for number in range(2)]
    with pytest.raises(RequestError, match="2 places for 2 images; a text must not contain"):
        prepare(processor, "<|image_2|> and <|image_1|>", sources)


def test_of_many_images_some_types_make_no_tiles(folder: Path) -> None:
    _, (_, few) = _prepared(folder, "deepseek_vl_v2", [0, 1])
    _, (_, many) = _prepared(folder, "deepseek_vl_v2", [0, 1, 0])
    _, (_, again) = _prepared(folder, "deepseek_vl_v2", [0, 1])
    assert [len(image.places) for image in few] == [27, 27]
    assert [len(image.places) for image in many] == [13, 13, 13]
    assert many[0].digest == many[2].digest
    assert few == again


def test_a_prompt_has_one_beginning(folder: Path) -> None:
    _, processor = _loaded(folder, "deepseek_vl_v2")
    source = ImageSource(picture(0), None, "auto")
    without, _ = prepare(processor, "<image>", [source])
    assert prepare(processor, "<|endoftext|><image>", [source]).tokens == without


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


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_tokenizer_without_the_token_of_images(tmp_path: Path, unknown: str | None) -> None:
    path = vision_dir(tmp_path, "molmo")
    tokenizer = (path / "tokenizer.json").read_text().replace("<im_patch>", "<unk>")
    (path / "tokenizer.json").write_text(tokenizer)
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"unk_token": unknown}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="the tokenizer has no '<im_patch>'"):
        load_processor(str(path), "molmo", trust_remote_code=False)
