"""Adapters of vision models: those of the language model, whatever the vision tower is called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.engine.adapters import matrices, write_peft
from support.engine.bench import Bench
from support.tiny import tiny_model
from support.vision.image_maker import ImageMaker
from support.vision.tiny_vision import solo_tokens, vision_model, vlm_model

from chairlift.engine.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from chairlift.engine.model import attention

# How transformers (of several versions) and mlx-vlm name the layers of the language model.
PREFIXES = ["model.language_model.", "language_model.model.", "model."]
TOWER = "model.vision_tower.vision_model.encoder."


def _renamed(pairs: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {re.sub(r"^(?:\w+\.)*?(?=layers\.\d)", prefix, name): p for name, p in pairs.items()}


def _merged(model: Any, pairs: dict[str, Any]) -> Any:
    """mlx-vlm's model with an adapter's product in its weights."""
    modules = dict(model.language_model.named_modules())
    for name, (a, b) in pairs.items():
        modules[name].weight = modules[name].weight + (a @ b).T
    return model


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3", "llava", "mistral3", "qwen2_vl"])
def test_rows_with_images_get_the_tokens_of_merged_weights(model_type: str, tmp_path: Path) -> None:
    model = vision_model(model_type, seed=3)
    attention.install(model)
    alone = [vlm_model(model_type, seed=3) for _ in range(3)]
    bench = Bench(model, tokens=24, prefix=1 << 24, bands=2)
    for seed in (1, 2):
        pairs = matrices(alone[0].language_model, seed)
        folder = write_peft(tmp_path / str(seed), _renamed(pairs, PREFIXES[seed]))
        loaded = bench.core.load_adapter(LoadAdapter(f"a{seed}", str(folder)))
        assert isinstance(loaded, AdapterLoaded), loaded
        _merged(alone[seed], pairs)
    prompts = [ImageMaker(model_type).prompt(number, [5, 9]) for number in range(2)]
    rows = [(number, seed) for number in range(2) for seed in range(3)]
    for number, seed in rows:
        prompt, images = prompts[number]
        reading = {"images": images, "adapter": f"a{seed}" if seed else ""}
        bench.submit(f"{number} {seed}", prompt, 8, reading=reading)
        bench.step()
    bench.drain()
    tokens = [bench.tokens(f"{number} {seed}") for number, seed in rows]
    assert tokens == [solo_tokens(alone[seed], *prompts[number], 8) for number, seed in rows]
    assert len(set(map(tuple, tokens))) > 3


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_vision_towers_layers_do_not_hide_the_language_models(
    prefix: str, tmp_path: Path
) -> None:
    bench = Bench(vision_model("gemma3", seed=3))
    pairs = matrices(vlm_model("gemma3", seed=3).language_model, 1)
    folder = write_peft(tmp_path, _renamed(pairs, prefix))
    assert isinstance(bench.core.load_adapter(LoadAdapter("a", str(folder))), AdapterLoaded)


@pytest.mark.parametrize("sees", [False, True])
def test_an_adapter_of_the_vision_tower_is_refused(sees: bool, tmp_path: Path) -> None:
    """Its blocks have the same names as those of the language model, here even the same shapes."""
    model = vision_model("gemma3", seed=3) if sees else tiny_model("llama")
    language_model = model.model.language_model if sees else model
    folder = write_peft(tmp_path, _renamed(matrices(language_model, 1), TOWER))
    failed = Bench(model).core.load_adapter(LoadAdapter("a", str(folder)))
    assert isinstance(failed, AdapterFailed)
    assert f"the model has no linear layer '{TOWER}layers.0" in failed.message
