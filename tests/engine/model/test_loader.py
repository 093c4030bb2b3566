"""Loading weights: types, sizes, context lengths, and one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from conformance.weights import tiny_model as conformance_model
from gguf.constants import GGMLQuantizationType as GGMLType
from mlx.utils import tree_flatten
from mlx_lm.utils import save_config
from support.models import default_model_path, write_tiny_gguf
from support.tiny import TinyKind, tiny_model, tiny_model_dir

from chairlift.engine.device import memory
from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.source import ModelSource, resolve
from chairlift.engine.messages import Loading
from chairlift.engine.model import loader
from chairlift.engine.model.loader import load_model
from chairlift.engine.model.text.tokenizer import load_tokenizer

PROMPT = mx.array([[5, 77, 130, 9, 200, 31]])


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Any:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def _directory(path: Path) -> ModelSource:
    return ModelSource(path.name, "directory", path)


def _edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def _quantized_dir(tmp_path: Path) -> Path:
    """A tiny llama directory as ``mlx_lm.convert -q`` writes it, in bfloat16."""
    path = tiny_model_dir(tmp_path, "llama")
    model = tiny_model("llama")
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    config = json.loads((path / "config.json").read_text())
    save_config(config | {"quantization": {"group_size": 32, "bits": 4}}, path / "config.json")
    return path


def _dtypes(model: Any) -> set[mx.Dtype]:
    return {array.dtype for _, array in tree_flatten(model.parameters())}


@pytest.mark.system
def test_the_default_model_answers() -> None:
    reports: list[Loading] = []
    source = ModelSource("smollm", "gguf", default_model_path())
    loaded = load_model(source, "auto", reports.append)
    assert (loaded.architecture, loaded.dtype, loaded.max_context) == ("llama", "float32", 8192)
    assert loaded.weight_bytes == 538_060_032
    assert {report.text for report in reports} == {"loading weights"}
    assert (reports[0].done, reports[-1].done) == (0, reports[-1].total)
    # The tensors are nearly all of the file.
    size = source.path.stat().st_size
    assert size * 0.9 < reports[-1].total < size
    tokenizer = load_tokenizer(source)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    cache = loaded.model.make_cache()
    tokens, answer = mx.array([prompt]), []
    while len(answer) < 12:
        token = mx.argmax(loaded.model(tokens, cache)[0, -1]).item()
        if token in tokenizer.eos_token_ids:
            break
        answer.append(token)
        tokens = mx.array([[token]])
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_directory_loads_as_it_was_saved(tmp_path: Path, kind: TinyKind) -> None:
    loaded = load_model(_directory(tiny_model_dir(tmp_path, kind)), "auto")
    assert mx.array_equal(loaded.model(PROMPT), tiny_model(kind)(PROMPT)).item()
    assert loaded.dtype == "float32"
    assert loaded.max_context == 4096
    assert loaded.config["hidden_size"] == 64
    assert not loaded.model.training


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dtype_applies_to_all_floating_point_parameters(tmp_path: Path, dtype: str) -> None:
    loaded = load_model(_directory(tiny_model_dir(tmp_path, "llama")), dtype)
    assert loaded.dtype == dtype
    assert _dtypes(loaded.model) == {getattr(mx, dtype)}
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"), GGMLType.Q8_0)
    loaded = load_model(resolve(str(path)), dtype)
    assert _dtypes(loaded.model) == {getattr(mx, dtype)}


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "nemotron_h"])
def test_float32_applies_also_to_what_a_class_exempts(name: str) -> None:
    """Otherwise a layer would compute in two types."""
    model = conformance_model(name)
    assert not all(map(model.cast_predicate, dict(tree_flatten(model.parameters()))))
    halves = [(path, array.astype(mx.bfloat16)) for path, array in tree_flatten(model.parameters())]
    model.load_weights(halves, strict=False)
    loader._cast(model, mx.float32)
    assert _dtypes(model) == {mx.float32}


def test_a_quantized_directory_stays_quantized_if_it_should(tmp_path: Path) -> None:
    path = _quantized_dir(tmp_path)
    asked: list[tuple[int, int]] = []

    def keep(size: int, group: int) -> bool:
        asked.append((size, group))
        return True

    kept = load_model(_directory(path), "auto", keep_quantized=keep).model
    assert asked == [((path / "model.safetensors").stat().st_size, 32)]
    assert load_model(_directory(path), "auto").quantized
    layer = kept.model.layers[0].mlp.up_proj
    assert type(layer) is nn.QuantizedLinear
    assert layer.scales.dtype == mx.float32
    tokens = mx.array([[1, 5, 2, 7]])
    expected = load_model(_directory(path), "auto").model(tokens)
    assert mx.allclose(kept(tokens), expected, rtol=1e-3, atol=1e-3).item()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_type_in_the_files_is_known(tmp_path: Path, dtype: str) -> None:
    model, path = tiny_model("llama"), tiny_model_dir(tmp_path, "llama")
    model.set_dtype(getattr(mx, dtype))
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    for asked in ("auto", "float32"):
        loaded = load_model(_directory(path), asked)
        assert (loaded.dtype, loaded.file_dtype) == ("float32", getattr(mx, dtype))
        assert loaded.has_half_precision == (dtype != "float32")


def test_a_null_quantization_is_none(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    _edit_config(path, quantization=None, quantization_config=None)
    assert not load_model(_directory(path), "auto").quantized


def test_a_quantized_directory_is_dequantized_on_the_cpu(tmp_path: Path) -> None:
    source = _directory(_quantized_dir(tmp_path))
    loaded = load_model(source, "auto")
    assert _dtypes(loaded.model) == {mx.float32}
    kept = load_model(source, "bfloat16")
    assert _dtypes(kept.model) == {mx.bfloat16, mx.uint32}
    assert kept.dtype == "bfloat16"
    assert kept.weight_bytes < loaded.weight_bytes / 4
    # Scales are converted to float32 before they multiply, so that no precision is lost.
    quantized = kept.model.layers[0].mlp.up_proj
    exact = mx.dequantize(
        quantized.weight,
        quantized.scales.astype(mx.float32),
        quantized.biases.astype(mx.float32),
        32,
        4,
    )
    assert mx.array_equal(loaded.model.layers[0].mlp.up_proj.weight, exact).item()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4096),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 8192),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            },
            4096,
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_the_context_length_comes_from_the_configuration(
    tmp_path: Path, changes: dict[str, Any], expected: int | None
) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    _edit_config(path, **changes)
    assert load_model(_directory(path), "auto").max_context == expected


def _truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _drop_weight(path: Path) -> None:
    weights = dict(mx.load(str(path / "model.safetensors")))
    weights.pop("model.norm.weight")
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights)


BREAKAGES: list[tuple[Callable[[Path], Any], type[ModelError], str]] = [
    (lambda path: (path / "config.json").unlink(), ModelError, "no config.json"),
    (
        lambda path: (path / "config.json").write_text("{"),
        ModelError,
        "config.json: damaged, this is not JSON: Expecting",
    ),
    (lambda path: (path / "config.json").write_text("{}"), ModelError, "lacks 'model_type'"),
    (lambda path: (path / "model.safetensors").unlink(), ModelError, "no model.*safetensors"),
    (lambda path: (path / "model.safetensors").write_bytes(b"x"), ModelError, "truncated"),
    (_truncate, ModelError, "damaged or truncated"),
    (_drop_weight, ModelError, "Missing 1 parameters: model.norm.weight"),
    (lambda path: _edit_config(path, hidden_size=32), ModelError, "shape"),
    (
        lambda path: _edit_config(path, model_type="nonesuch"),
        UnsupportedModel,
        "nonesuch",
    ),
    (lambda path: _edit_config(path, model_file="x.py"), ModelError, "custom module"),
]


@pytest.mark.parametrize(("breakage", "error", "line"), BREAKAGES)
def test_broken_directories_are_one_line_errors(
    tmp_path: Path, breakage: Callable[[Path], Any], error: type[ModelError], line: str
) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    breakage(path)
    with pytest.raises(ModelError, match=line) as caught:
        load_model(_directory(path), "auto")
    assert type(caught.value) is error
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dtype 'int4' is not one of auto, float32"):
        load_model(_directory(tmp_path), "int4")


def test_a_model_larger_than_memory_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    with pytest.raises(ModelError, match=r"not enough memory: .* and 0\.00 GB are free"):
        load_model(ModelSource("m", "directory", folder), "auto")


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_a_models_code_is_not_run_without_permission(tmp_path: Path, name: str) -> None:
    folder = tiny_model_dir(tmp_path, "llama")
    ran = tmp_path / "ran"
    (folder / "custom.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    source = ModelSource("m", "directory", folder)
    if name == "model":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_file": "custom.py"}))
        with pytest.raises(ModelError):
            load_model(source, "auto")
    else:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text()) if path.exists() else {}
        automatic = {"AutoTokenizer": ["custom.Custom", None]}
        settings |= {"tokenizer_class": "Custom", "auto_map": automatic}
        path.write_text(json.dumps(settings))
        with pytest.raises(ModelError):
            load_tokenizer(source)
    assert not ran.exists()
