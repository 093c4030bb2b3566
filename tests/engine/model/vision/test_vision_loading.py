"""Which models are served with images, and which without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conformance.vision.configs import tiny_model
from conformance.vision.types import TYPES
from mlx.utils import tree_flatten
from support.paths import ROOT
from support.tiny import EOS_ID
from support.vision.processors.plain import PLAIN_PROCESSORS
from support.vision.tiny_vision import CONFIGS, VOCAB_SIZE
from support.vision.vision_dir import vision_dir

from chairlift.cache.quantized import Quantization
from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.hub.weights import weight_size
from chairlift.engine.model import architecture, loader
from chairlift.engine.model.loader import load_model
from chairlift.engine.model.text.tokenizer import load_tokenizer
from chairlift.engine.model.trials.probe import probe
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


@pytest.mark.parametrize("text_only", [False, True])
def test_only_a_model_without_images_stays_quantized_on_the_cpu(
    tmp_path: Path, text_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX computes images, and is slow with quantized weights."""
    dequantized: list[Any] = []

    def dequantize(model: Any) -> Any:
        dequantized.append(model)
        return model

    monkeypatch.setattr(loader, "dequantize_model", dequantize)
    source = _source(vision_dir(tmp_path, "qwen2_vl"))
    load_model(source, "auto", text_only=text_only, keep_quantized=lambda size, group: True)
    assert bool(dequantized) is not text_only


def test_a_model_whose_parts_are_nested_is_served_with_images(tmp_path: Path) -> None:
    path = vision_dir(tmp_path, "qwen3_omni_moe")
    file = path / "config.json"
    config = json.loads(file.read_text())
    names = ("model_type", "thinker_config", "talker_config", "code2wav_config")
    nested = {name: config[name] for name in names}
    nested["thinker_config"]["text_config"]["eos_token_id"] = EOS_ID
    file.write_text(json.dumps(nested))
    loaded = load_model(_source(path), "auto")
    assert isinstance(loaded.model, VisionModel)
    assert loaded.max_context == 4096
    # Not those that speak.
    assert loaded.weight_bytes < (path / "model.safetensors").stat().st_size * 2 / 3
    assert {name.split(".")[1] for name, _ in tree_flatten(loaded.model.parameters())} == {
        "thinker"
    }
    assert load_tokenizer(_source(path)).eos_token_ids == {EOS_ID}
    assert weight_size(_source(path), "auto", on_cpu=True).vocabulary == VOCAB_SIZE


def test_caches_that_cannot_be_quantized_are_refused_at_start() -> None:
    """A layer of Qwen4 caches three numbers of each token beside the keys of its indexer."""
    config = TYPES["qwen4_exp"].config
    text = config["text_config"] | {"head_dim": 32, "indexer_head_dim": 32}
    tiny = replace(TYPES["qwen4_exp"], config={**config, "text_config": text})
    model = VisionModel(tiny_model("qwen4_exp", tiny=tiny), "qwen4_exp")
    refused = "qwen4_exp cannot be served with --kv-bits: a KV group of 32 does not divide the"
    with pytest.raises(UnsupportedModel, match=refused):
        probe(model, "qwen4_exp", Quantization(8, 32))


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
        nested = {"thinker_config": {"vision_config": {}}}
        assert vision_type({"model_type": model_type, **nested}) == model_type
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
    assert CONFIGS.keys() == PLAIN_PROCESSORS.keys() <= FAMILIES.keys()
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
