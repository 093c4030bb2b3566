"""Directories of other tools: what cannot be served is refused in a line that says why."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.tiny import tiny_model_dir

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.load_errors import wrong_field
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.architecture import argument_class
from chairlift.engine.model.loader import load_model
from chairlift.engine.model.text.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def _edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def _replace(path: Path, suffixes: dict[str, Any], dtype: str = "float32") -> None:
    """Gives each projection's weight this type, and tensors of these suffixes beside it."""
    file = path / "model.safetensors"
    found: Any = mx.load(str(file))
    weights = {name: np.array(array) for name, array in found.items()}
    for name in [name for name in weights if "proj.weight" in name]:
        weights[name] = (weights[name] * 40).astype(dtype)
        for suffix, like in suffixes.items():
            weights[name.removesuffix(".weight") + suffix] = like
    save_file(weights, file)


def _refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(ModelSource("m", "directory", path), "auto")
    line = str(caught.value)
    assert str(path) in line
    assert "\n" not in line
    assert len(line) < 800
    return line


ONES = np.ones(4, np.float32)
FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fp8": ({"quant_method": "fp8"}, {".weight_scale_inv": ONES}, "float32"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, {".qweight": ONES, ".g_idx": ONES}, "float32"),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {".SCB": ONES},
        "int8",
    ),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        {".weight_scale": ONES},
        "float32",
    ),
    r"with tensors named \*.qweight": ({}, {".qweight": ONES}, "float32"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_quantization_is_named_with_a_remedy(tmp_path: Path, kind: str) -> None:
    settings, suffixes, dtype = FOREIGN[kind]
    path = tiny_model_dir(tmp_path, "llama")
    _replace(path, suffixes, dtype)
    if settings:
        _edit_config(path, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=rf"quantized \({kind}\)"):
        load_model(ModelSource("m", "directory", path), "auto")
    assert "mlx_lm.convert" in _refusal(path)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "bool"])
def test_packed_weights_without_scales_are_refused(tmp_path: Path, dtype: str) -> None:
    """mlx-lm computes with the bytes of 8-bit floats as if they were whole numbers."""
    path = tiny_model_dir(tmp_path, "llama")
    _replace(path, {}, dtype)
    assert f"proj.weight has numbers of the type {dtype.removesuffix('8')}" in _refusal(path)


def test_numbers_that_mlx_cannot_read_are_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    _replace(path, {}, "float64")
    assert "unsupported dtype F64; convert them to BF16, F16 or F32" in _refusal(path)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("hidden_size", "64", "a whole number"),
        ("num_hidden_layers", None, "a whole number"),
        ("intermediate_size", 128.0, "a whole number"),
        ("rms_norm_eps", "1e-6", "a number"),
        ("rope_theta", None, "a number"),
        ("rope_scaling", [1], "an object or null"),
        ("quantization", "4bit", "an object whose group_size and bits are whole numbers"),
        ("quantization", {"bits": 4}, "an object whose group_size and bits are whole numbers"),
        ("quantization_config", "awq", "an object with a quant_method"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(
    tmp_path: Path, name: str, value: object, kind: str
) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    assert wrong_field(path, argument_class(path)) is None
    _edit_config(path, **{name: value})
    fault = f"{name} is {json.dumps(value)}, not {kind}"
    assert wrong_field(path, argument_class(path)) == fault
    if not name.startswith("rope"):  # these are noticed only by the first computation
        assert f"config.json: {fault}; " in _refusal(path)


@pytest.mark.parametrize("name", ["consolidated.safetensors", "pytorch_model.safetensors"])
def test_weights_of_another_name_are_named(tmp_path: Path, name: str) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    (path / "model.safetensors").rename(path / name)
    assert f"but {name}; " in _refusal(path)


@pytest.mark.parametrize("has_config", [True, False])
def test_an_adapters_folder_is_no_model(tmp_path: Path, has_config: bool) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    (path / "model.safetensors").rename(path / "adapters.safetensors")
    (path / "adapter_config.json").write_text("{}")
    if not has_config:
        (path / "config.json").unlink()
    assert f"serve its base model with --lora NAME={path}" in _refusal(path)


@pytest.mark.parametrize("jinja", [None, "J"])
@pytest.mark.parametrize(
    ("legacy", "found"), [(None, "own"), ({}, "own"), ({"chat_template": None}, "own"), ("L", "L")]
)
def test_the_template_comes_from_the_file_that_transformers_takes(
    tmp_path: Path, jinja: str | None, legacy: Any, found: str
) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "own"
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    if legacy is not None:
        content = {"chat_template": legacy} if isinstance(legacy, str) else legacy
        (path / "chat_template.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(ModelSource("m", "directory", path))
    question = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(question, tokenize=False) == (jinja or found)


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    (path / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(ModelError, match=r"chat_template\.json: damaged, chat_template is no text"):
        load_tokenizer(ModelSource("m", "directory", path))


@pytest.mark.parametrize("named", [False, True])
def test_a_changed_tiktoken_vocabulary_is_read_anew(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tiktoken keeps files by their path alone, in a folder that outlives the process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    if named:  # as some clients do
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    path = tiny_model_dir(tmp_path, "llama")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for order in (range(256), reversed(range(256))):
        lines = [f"{_base64(byte)} {rank}" for rank, byte in enumerate(order)]
        (path / "tokenizer.model").write_text("\n".join(lines) + "\n")
        ids = load_tokenizer(ModelSource("m", "directory", path)).encode("a")
        assert ids[-1] == (97 if order == range(256) else 255 - 97)
    assert os.environ.get("TIKTOKEN_CACHE_DIR") == (str(tmp_path / "cache") if named else None)


def _base64(byte: int) -> str:
    return base64.b64encode(bytes([byte])).decode()


def test_a_vocabulary_for_the_models_own_code_says_so(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    (path / "tokenizer.json").unlink()
    (path / "qwen.tiktoken").write_text("YQ== 0\n")
    with pytest.raises(ModelError, match=r"reads qwen\.tiktoken; --trust-remote-code allows it"):
        load_tokenizer(ModelSource("m", "directory", path))
