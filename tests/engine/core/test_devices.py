"""An engine with each device's settings, on the CPU: from a model's files to its tokens."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from support.models import GGUF_VOCAB_SIZE, write_tiny_gguf
from support.tiny import tiny_model, tiny_model_dir

from chairlift.engine.config import EngineConfig
from chairlift.engine.core.start import start_core
from chairlift.engine.device import profile
from chairlift.engine.device.profile import DeviceProfile
from chairlift.engine.hub.source import resolve
from chairlift.engine.messages import SamplingParams, Submit

PROMPT = [5, 6, 7, 9]

pytestmark = pytest.mark.usefixtures("same_stream")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = {"directory": tiny_model_dir(folder / "plain", "llama")}
    path = paths["4 bits"] = tiny_model_dir(folder / "quantized", "llama")
    model = tiny_model("llama")
    nn.quantize(model, 32, 4)
    mx.save_safetensors(
        str(path / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    paths["gguf"] = folder / "tiny.gguf"
    write_tiny_gguf(paths["gguf"], "llama", tiny_model("llama", vocab_size=GGUF_VOCAB_SIZE))
    return paths


@pytest.fixture(scope="module")
def expected(sources: dict[str, Path]) -> dict[str, list[int]]:
    """The tokens of each model with this machine's settings."""
    return {kind: _tokens(path, "float32")[0] for kind, path in sources.items()}


def _tokens(path: Path, dtype: str) -> tuple[list[int], str]:
    """The tokens of a request, and the type of the weights."""
    config = EngineConfig(kv_memory=1 << 26, dtype=dtype)  # type: ignore[arg-type]
    core, info = start_core(config, resolve(str(path)), lambda progress: None)
    params = SamplingParams(max_tokens=6, seed=0, temperature=0.0)
    core.submit(Submit("a", PROMPT, params))
    tokens = []
    while not core.idle:
        tokens += [token for output in core.step().outputs for token in output.token_ids]
    core.close(1)
    return tokens, info.dtype


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["directory", "4 bits", "gguf"])
@pytest.mark.parametrize("device", [profile.CUDA, profile.METAL], ids=lambda device: device.kind)
def test_a_model_is_served_with_each_devices_settings(
    device: DeviceProfile,
    kind: str,
    dtype: str,
    sources: dict[str, Path],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile, "current", lambda: device)
    monkeypatch.setattr(mx.fast, "rope", mx.fast.rope)  # is replaced on CUDA
    tokens, used = _tokens(sources[kind], dtype)
    assert len(tokens) == len(expected[kind]) == 6
    assert used == ("bfloat16" if dtype == "bfloat16" else "float32")
    if used == "float32":
        assert tokens == expected[kind]
