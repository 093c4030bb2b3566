"""A server whose model has changed takes no prefixes of the one before it from disk."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engine.client.engine_client import drained, request, tokens_of
from support.models import GGUF_VOCAB_SIZE, write_tiny_gguf
from support.tiny import tiny_model, tiny_model_dir

from chairlift.cache.saved.nodes import weights_sample
from chairlift.engine.client.local import LocalClient
from chairlift.engine.config import EngineConfig
from chairlift.engine.hub.source import ModelSource, resolve
from chairlift.engine.hub.weights import tensor_places
from chairlift.engine.messages import TokenOutput

# So many that evenly spaced blocks cover less than half of the file.
LAYERS = 16


def _change(file: Path, name: str) -> None:
    """Changes all numbers of one tensor."""
    weights: Any = mx.load(str(file))
    weights[name] = weights[name] + 0.5
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})


def _sample(path: Path) -> str:
    return weights_sample(tensor_places(resolve(str(path))))


def test_every_tensor_counts(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", layers=LAYERS)
    file = folder / "model.safetensors"
    original = file.read_bytes()
    weights: Any = mx.load(str(file))
    names = list(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    samples = [_sample(folder)]
    for name in names:
        _change(file, name)
        samples.append(_sample(folder))
        mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    assert len(set(samples)) == len(names) + 1
    # A file that is no weights file, such as a pointer to one, is no error.
    (folder / "consolidated.safetensors").write_bytes(original[:100])
    assert _sample(folder) not in samples


def test_every_tensor_of_a_gguf_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama", vocab_size=GGUF_VOCAB_SIZE, layers=2))
    original = path.read_bytes()
    [places] = tensor_places(resolve(str(path))).values()
    samples = [_sample(path)]
    for place in places:
        changed = np.frombuffer(original, np.uint8).copy()
        changed[place : place + 4] += 1
        path.write_bytes(changed.tobytes())
        samples.append(weights_sample({path: places}, blocks=2))
    assert len(set(samples)) == len(places) + 1


async def _reply(folder: Path, prompt: list[int], prefixes: Path | None) -> list[TokenOutput]:
    config = EngineConfig(
        max_rows=4,
        kv_memory=64 << 20,
        prefix_cache_bytes=1 << 22,
        prefix_cache_dir=prefixes,
    )
    client = LocalClient(config, ModelSource("tiny", "directory", folder))
    await client.start()
    reply = await drained(client.submit(request(prompt, max_tokens=8)))
    await client.stop()
    return reply[0]


@pytest.mark.slow
async def test_a_model_with_another_norm_computes_prompts_again(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, "llama", layers=LAYERS)
    random_ = random.Random(3)
    prompt = [random_.randrange(3, 250) for _ in range(150)]
    await _reply(folder, prompt, tmp_path / "prefixes")
    again = await _reply(folder, prompt, tmp_path / "prefixes")
    assert again[0].cached_tokens == len(prompt) - 1
    _change(folder / "model.safetensors", "model.layers.4.input_layernorm.weight")
    other = await _reply(folder, prompt, tmp_path / "prefixes")
    assert other[0].cached_tokens == 0
    assert tokens_of(other) == tokens_of(await _reply(folder, prompt, None))
