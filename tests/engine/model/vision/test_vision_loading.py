"""Which models are served with images, and which without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.paths import ROOT
from support.vision.tiny_vision import CONFIGS
from support.vision.vision_dir import PROCESSORS, vision_dir

from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model import architecture
from chairlift.engine.model.loader import load_model
from chairlift.engine.model.tokenizer import load_tokenizer
from chairlift.engine.model.vision.families import (
    ALIASES,
    ALWAYS_SEE,
    FAMILIES,
    UNPREPARED,
    vision_type,
)
from chairlift.engine.model.vision.model import VisionModel


def _source(path: Path) -> ModelSource:
    return ModelSource(path.name, "directory", path)


@pytest.mark.parametrize("text_only", [False, True])
def test_a_model_that_sees_is_served_with_or_without_images(
    tmp_path: Path, text_only: bool
) -> None:
    path = vision_dir(tmp_path, "qwen2_vl")
    loaded = load_model(_source(path), "auto", text_only=text_only)
    assert isinstance(loaded.model, VisionModel) is not text_only
    assert (loaded.architecture, loaded.dtype) == ("qwen2_vl", "float32")
    assert loaded.max_context == 4096


def test_without_the_extra_it_is_served_without_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(architecture, "is_installed", lambda: False)
    monkeypatch.setattr("chairlift.engine.model.loader.is_installed", lambda: False)
    caplog.set_level("INFO")
    path = vision_dir(tmp_path, "qwen2_vl")
    assert not isinstance(load_model(_source(path), "auto").model, VisionModel)
    assert "pip install 'chairlift[vision]' serves them" in caplog.text


def test_without_the_extra_a_model_that_only_mlx_vlm_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "is_installed", lambda: False)
    path = vision_dir(tmp_path, "idefics3")
    with pytest.raises(UnsupportedModel, match=r"idefics3 needs the extra: pip install .*vision"):
        load_model(_source(path), "auto")


def test_only_known_types_with_images_see() -> None:
    for model_type in FAMILIES.keys() - UNPREPARED:
        config = {"model_type": model_type, "vision_config": {}}
        assert vision_type(config) == model_type
        without = vision_type({"model_type": model_type})
        assert without == (model_type if model_type in ALWAYS_SEE else None)
        assert vision_type({**config, "model_file": "model.py"}) is None
    assert FAMILIES.keys() - UNPREPARED >= ALWAYS_SEE
    for name, model_type in ALIASES.items():
        assert vision_type({"model_type": name, "vision_config": {}}) == model_type
    for model_type in ("llama", None, *UNPREPARED):
        assert vision_type({"model_type": model_type, "vision_config": {}}) is None


def test_the_guide_has_all_types() -> None:
    guide = (ROOT / "docs" / "guides" / "vision.md").read_text()
    assert [model_type for model_type in FAMILIES if f"`{model_type}`" not in guide] == []
    assert CONFIGS.keys() == PROCESSORS.keys() <= FAMILIES.keys()
    assert FAMILIES.keys() >= UNPREPARED


def test_a_template_in_a_file_of_the_processor_is_found(tmp_path: Path) -> None:
    path = vision_dir(tmp_path, "llava")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert not load_tokenizer(_source(path)).has_chat_template
    (path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(_source(path)).chat_template == template
    assert load_tokenizer(_source(path), "other").chat_template == "other"
