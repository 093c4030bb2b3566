"""Adapted model files: unchanged with mlx-lm's own caches, and correct in batches."""

from __future__ import annotations

import json
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conformance.check import check
from conformance.configs import tiny_config
from conformance.overrides import OVERRIDES
from conformance.values import VOCAB
from conformance.weights import tiny_model
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from support.engine.bench import Bench
from support.engine.reference import solo_tokens

from chairlift.engine.cpu import kernels
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model import attention
from chairlift.engine.model.adapters import ADAPTED, adapt
from chairlift.engine.model.loader import load_model
from chairlift.engine.model.trials.probe import probe


@pytest.mark.parametrize("name", ADAPTED)
def test_adapting_changes_nothing_with_mlx_lms_caches_or_none(name: str) -> None:
    plain, adapted = tiny_model(name), tiny_model(name)
    for _ in range(2):
        adapt(adapted)
    assert type(adapted).__module__ == type(plain).__module__ == f"mlx_lm.models.{name}"
    assert _classes(plain) != _classes(adapted)
    assert (
        dict(tree_flatten(plain.parameters())).keys()
        == dict(tree_flatten(adapted.parameters())).keys()
    )
    caches = [make_prompt_cache(model) for model in (plain, adapted)]
    assert list(map(type, caches[0])) == list(map(type, caches[1]))
    for length in (3, 1, 20, 1, 1):
        tokens = mx.random.randint(0, VOCAB, (1, length))
        expected, actual = (
            m(tokens, cache=c) for m, c in zip((plain, adapted), caches, strict=True)
        )
        assert np.array_equal(np.array(actual), np.array(expected))
    assert np.array_equal(np.array(adapted(tokens)), np.array(plain(tokens)))


def _classes(model: object) -> list[type]:
    return [type(part) for part in model.modules()]  # type: ignore[attr-defined]


def test_other_models_are_left_alone() -> None:
    model = tiny_model("gemma3")
    before = _classes(model)
    adapt(model)
    assert _classes(model) == before


@pytest.mark.parametrize("name", ADAPTED)
def test_a_loaded_model_is_adapted(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(name)))
    weights = dict(tree_flatten(tiny_model(name).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    loaded = load_model(ModelSource(name, "directory", tmp_path), "float32")
    probe(loaded.model, loaded.architecture)
    adapted = tiny_model(name)
    adapt(adapted)
    assert _classes(loaded.model) == _classes(adapted)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ADAPTED)
def test_random_traffic_gets_the_solo_tokens(name: str, eager: bool) -> None:
    """Requests with shared prefixes come and go; prompts take several chunks."""
    model = tiny_model(name, seed=2)
    adapt(model)
    attention.install(model)
    if eager:
        kernels.install(model)
    random_ = random.Random(2)
    bench = Bench(model, prefix=1 << 24, eager=eager)
    shared = [random_.randrange(VOCAB) for _ in range(50)]
    requests: dict[str, tuple[list[int], int]] = {}
    for i in range(10):
        rest = [random_.randrange(VOCAB) for _ in range(random_.choice([1, 2, 9, 30]))]
        prompt = [*shared[: (0, 17, 50)[i % 3]], *rest]
        requests[str(i)] = prompt, random_.randrange(2, 16)
        bench.submit(str(i), *requests[str(i)])
        for _ in range(random_.randrange(4)):
            bench.step()
    bench.drain()
    for i, (prompt, count) in requests.items():
        assert bench.tokens(i) == solo_tokens(model, prompt, count, bench.tokens(i)), i
    assert sum(stats.prefix_hits for stats in bench.stats) > 50


@pytest.mark.slow
def test_compression_groups_of_different_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of deepseek_v41 may have its own ratio, also of one token."""
    changes = {
        "compress_ratios": (0, 1, 1, 4, 0, 16),
        "kv_source_layer_ids": (1, 3, 5),
        "index_source_layer_ids": (1, 2, 3, 5),
        "candidate_source_layer_id": -1,
    }
    monkeypatch.setitem(OVERRIDES, "deepseek_v41", OVERRIDES["deepseek_v41"] | changes)
    result = check("deepseek_v41", seeds=(40,))  # a schedule of few steps
    assert result.outcome == "passed", result.detail
