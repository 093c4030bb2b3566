"""Processors: texts with images become the tokens and embeddings of mlx-vlm's own path."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.vision.processors import PROCESSORS
from support.vision.prompts import TinyPrompts
from support.vision.vision_dir import picture

from chairlift.engine.errors import RequestError
from chairlift.engine.messages import ImageSource
from chairlift.engine.model.vision.families import family_of
from chairlift.engine.model.vision.image_arrays import mlx_of
from chairlift.engine.model.vision.processors.processing import processing_of
from chairlift.engine.model.vision.processors.processor import prepare

# Code of mlx-vlm and transformers warns.
pytestmark = pytest.mark.filterwarnings("ignore")
SEVERAL = [name for name in PROCESSORS if processing_of(name).most is None]
GRIDS = [name for name in PROCESSORS if family_of(name).positions == "grid"]
ONE_IMAGE = [name for name in PROCESSORS if processing_of(name).most == 1]
# Images of one prompt that mlx-vlm does not confuse: its ERNIE and GLM-4V let the third and further
# ones see each other, and its Idefics 2 lets small images see their padding.
CONFUSED = {"ernie4_5_moe_vl": [0, 1, 3], "glm4v": [0, 1, 3], "idefics2": [0, 0]}
# Prompts with several images have the sizes 0, 1 and 3, with the tiles that an image has alone.
COVERED = {name for name in SEVERAL if name not in CONFUSED and not processing_of(name).tiled}
SIZED = [
    (name, size)
    for name, files in PROCESSORS.items()
    for size in (files.sizes[2:3] if name in COVERED else files.sizes)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def _tiny(folder: Path, model_type: str) -> TinyPrompts:
    return TinyPrompts(folder, model_type)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "size"), SIZED)
def test_embeddings_are_those_of_mlx_vlm(
    folder: Path, model_type: str, size: tuple[int, int]
) -> None:
    tiny = _tiny(folder, model_type)
    pictures = tiny.pictures([tiny.files.sizes.index(size)])
    tiny.assert_embeddings_are_those_of_mlx_vlm(tiny.text(1), pictures)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SEVERAL)
def test_embeddings_of_several_images_are_those_of_mlx_vlm(folder: Path, model_type: str) -> None:
    tiny = _tiny(folder, model_type)
    # Images of types with two sizes are large.
    numbers = CONFUSED.get(model_type, [0, 1, 0, 3])[: len(tiny.files.sizes) + 1]
    tiny.assert_embeddings_are_those_of_mlx_vlm(tiny.text(len(numbers)), tiny.pictures(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SEVERAL)
def test_several_images_are_each_as_alone(folder: Path, model_type: str) -> None:
    tiny = _tiny(folder, model_type)
    numbers = [0, 1, 0, 3][: processing_of(model_type).tiled][: len(tiny.files.sizes) + 1]
    tokens, images = tiny.prepared(numbers)
    last = -1
    for image, number in zip(images, numbers, strict=True):
        alone_tokens, (alone,) = tiny.prepared([number])
        assert image.digest == alone.digest
        assert tokens[image.span] == alone_tokens[alone.span]
        assert image.places[0] > last
        last = image.places[-1]
        for name, array in image.arrays.items():
            assert mx.isfinite(mlx_of(array).astype(mx.float32)).all().item(), name
    assert len({image.digest for image in images}) == len(set(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ONE_IMAGE)
def test_of_some_types_a_prompt_has_one_image(folder: Path, model_type: str) -> None:
    with pytest.raises(RequestError, match=r"a prompt of this model has at most 1 image$"):
        _tiny(folder, model_type).prepared([0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_a_text_has_one_mark_for_each_image_and_no_token_of_its_own(
    folder: Path, model_type: str
) -> None:
    tiny = _tiny(folder, model_type)
    for marks in (0, 2) if tiny.files.mark else ():
        with pytest.raises(RequestError, match=f"{marks} places for 1 images"):
            tiny.prepared([0], tiny.text(marks))
    for own in {tiny.processor.mark.numbered(1), tiny.processor._token} - {"", None}:
        with pytest.raises(RequestError, match="a text must not contain"):
            tiny.prepared([0], tiny.text(1) + own)


def test_a_text_has_nothing_that_the_processor_would_replace(folder: Path) -> None:
    tiny = _tiny(folder, "got")
    with pytest.raises(RequestError, match="a text must not contain '<image>'"):
        tiny.prepared([0], "What? <image>")


@pytest.mark.parametrize("model_type", ["phi3_v", "locateanything"])
def test_numbers_of_marks_are_in_order(folder: Path, model_type: str) -> None:
    tiny = _tiny(folder, model_type)
    text = " and ".join(tiny.processor.mark.numbered(number) for number in (2, 1))
    with pytest.raises(RequestError, match="2 places for 2 images; a text must not contain"):
        tiny.prepared([0, 1], text)


def test_of_many_images_some_types_make_no_tiles(folder: Path) -> None:
    tiny = _tiny(folder, "deepseek_vl_v2")
    _, few = tiny.prepared([0, 1])
    _, many = tiny.prepared([0, 1, 0])
    _, again = tiny.prepared([0, 1])
    assert [len(image.places) for image in few] == [27, 27]
    assert [len(image.places) for image in many] == [13, 13, 13]
    assert many[0].digest == many[2].digest
    assert few == again


def test_a_prompt_has_one_beginning(folder: Path) -> None:
    tiny = _tiny(folder, "deepseek_vl_v2")
    without, _ = tiny.prepared([0], "<image>")
    assert tiny.prepared([0], "<|endoftext|><image>").tokens == without


@pytest.mark.parametrize(("model_type", "tiles"), [("llama4", 3), ("step3p7", 5)])
def test_an_image_in_tiles_with_itself_as_the_last(
    folder: Path, model_type: str, tiles: int
) -> None:
    tiny = _tiny(folder, model_type)
    wide = picture(0, 1024, 512)
    image = prepare(tiny.processor, tiny.text(1), [ImageSource(wide, None, "auto")]).images[0]
    pixels = [array for name, array in image.arrays.items() if name.endswith("pixel_values")]
    assert sum(array.shape[0] for array in pixels) == tiles
    tiny.assert_embeddings_are_those_of_mlx_vlm(tiny.text(1), [wide])


def test_positions_are_those_of_the_processor(folder: Path) -> None:
    tiny = _tiny(folder, "hunyuan_vl")
    tokens, images = tiny.prepared([0])
    positions = tiny.inputs(tiny.text(1), tiny.pictures([0]))["position_ids"][0]
    shifts = tiny.model.shifts(tokens, images)
    assert shifts is not None
    assert (shifts + np.arange(len(tokens))).tolist() == positions.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", GRIDS)
def test_tokens_of_videos_in_a_text_have_positions_of_a_text(folder: Path, model_type: str) -> None:
    tiny = _tiny(folder, model_type)
    tokens, images = tiny.prepared([0])
    config = getattr(tiny.model.model.config, "thinker_config", tiny.model.model.config)
    marks = [getattr(config, f"{name}_token_id", None) for name in ("vision_start", "video")]
    plain = tiny.model.shifts([*tokens, 5, 6, 7], images)
    assert plain is not None
    written = [5 if mark is None else mark for mark in marks]
    assert np.array_equal(plain, tiny.model.shifts([*tokens, *written, 7], images))


def test_a_processor_that_refuses_an_image(folder: Path) -> None:
    tiny = _tiny(folder, "qwen2_vl")
    # Qwen's processor refuses sides of very different length.
    sources = [ImageSource(picture(1, 900, 3), None, "auto")]
    with pytest.raises(RequestError, match=r"refuses the images: .*ratio"):
        prepare(tiny.processor, tiny.text(1), sources)


def test_memory_that_runs_out_is_no_refusal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker knows how much a job may have, and says so."""
    tiny = _tiny(folder, "qwen2_vl")

    def process(*arguments: object, **settings: object) -> None:
        raise MemoryError

    monkeypatch.setattr(tiny.processor, "_processor", process)
    with pytest.raises(MemoryError):
        tiny.prepared([0])
