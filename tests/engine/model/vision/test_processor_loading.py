"""How processors are loaded: their settings, their tokenizers, and code of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import EOS_ID, SPECIALS
from support.vision.processors import PROCESSORS
from support.vision.prompts import TinyPrompts, processor_of
from support.vision.vision_dir import vision_dir
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from chairlift.engine.errors import ModelError, RequestError
from chairlift.engine.model.vision.processors.loading import load_processor

# Code of mlx-vlm and transformers warns.
pytestmark = pytest.mark.filterwarnings("ignore")


def _change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **values}))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", PROCESSORS)
def test_a_tokenizer_adds_no_tokens_to_a_rendered_template(tmp_path: Path, model_type: str) -> None:
    tiny = TinyPrompts(tmp_path, model_type, weights=False)
    # Moondream's text must not contain this token, which is that of its images.
    text = ("" if model_type == "moondream3" else SPECIALS[EOS_ID]) + tiny.text(1)
    expected = tiny.prepared([2], text).tokens
    tokenizer = Tokenizer.from_file(str(tiny.path / "tokenizer.json"))
    first = (SPECIALS[EOS_ID], EOS_ID)
    tokenizer.post_processor = TemplateProcessing(f"{first[0]} $A", None, [first])
    tokenizer.save(str(tiny.path / "tokenizer.json"))
    tiny.processor = processor_of(tiny.path, model_type)
    assert tiny.prepared([2], text).tokens == expected


def test_a_folder_without_processor(tmp_path: Path) -> None:
    path = vision_dir(tmp_path, "gemma3", weights=False)
    (path / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="the image processor cannot be loaded"):
        load_processor(str(path), "gemma3", trust_remote_code=False)


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_a_tokenizer_without_the_token_of_images(tmp_path: Path, unknown: str | None) -> None:
    path = vision_dir(tmp_path, "molmo", weights=False)
    tokenizer = (path / "tokenizer.json").read_text().replace("<im_patch>", "<unk>")
    (path / "tokenizer.json").write_text(tokenizer)
    _change(path / "tokenizer_config.json", unk_token=unknown)
    with pytest.raises(ModelError, match="the tokenizer has no '<im_patch>'"):
        load_processor(str(path), "molmo", trust_remote_code=False)


@pytest.mark.parametrize(
    "model_type", ["cohere_compass", "glm5_next", "kimi_k25", "kimi_k3", "locateanything"]
)
def test_a_processor_for_pixels_as_mlx_vlm_would_replace_it(
    tmp_path: Path, model_type: str
) -> None:
    """mlx-vlm's ``load`` takes one without the folder's settings, which has the published ones."""
    from mlx_vlm.utils import load_image_processor

    tiny = TinyPrompts(tmp_path, model_type, weights=False)
    numbers = range(len(tiny.files.sizes))
    own = [tiny.prepared([number]) for number in numbers]
    tiny.processor._processor.image_processor = load_image_processor(tiny.path)
    assert [tiny.prepared([number]) for number in numbers] == own


@pytest.mark.parametrize("trusted", [False, True])
def test_a_folder_has_code(tmp_path: Path, trusted: bool) -> None:
    path = vision_dir(tmp_path, "got", weights=False)
    # mlx-vlm's processor of this type trusts all code.
    _change(
        path / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
    )
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


def test_several_images_that_get_fewer_tiles_than_each_alone(tmp_path: Path) -> None:
    tiny = TinyPrompts(tmp_path, "plamo2vl", weights=False)
    _change(tiny.path / "preprocessor_config.json", tile_context_length=100)
    tiny.processor = processor_of(tiny.path, "plamo2vl")
    tiny.prepared([0])
    with pytest.raises(RequestError, match=r"makes \d+ image tokens of these images together"):
        tiny.prepared([0, 1])


def test_a_model_that_cannot_take_what_the_processor_makes(tmp_path: Path) -> None:
    tiny = TinyPrompts(tmp_path, "llava_next", weights=False)
    config = json.loads((tiny.path / "config.json").read_bytes())
    _change(tiny.path / "config.json", vision_config={**config["vision_config"], "image_size": 32})
    tiny.processor = processor_of(tiny.path, "llava_next")
    with pytest.raises(RequestError, match="refuses the images"):
        tiny.prepared([2])
