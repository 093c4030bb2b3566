"""A draft model, good or bad, changes no token; one like the target is nearly always right."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.engine.bench import Bench
from support.engine.drafts import verify_any
from support.tiny import TinyKind, tiny_model, tiny_model_dir

from chairlift.engine.config import DEFAULT_MODEL, EngineConfig
from chairlift.engine.core.core import EngineCore
from chairlift.engine.core.start import start_core
from chairlift.engine.cpu import kernels
from chairlift.engine.errors import ModelError
from chairlift.engine.hub.source import resolve
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.messages.speculative_config import SpeculativeConfig
from chairlift.engine.model import attention
from chairlift.engine.speculation import draft_model as draft_model_module

pytestmark = pytest.mark.usefixtures("small_blocks")
TOKENS, REQUESTS = 18, 8


@cache
def _model(kind: TinyKind, seed: int, eager: bool = False) -> Any:
    model = tiny_model(kind, seed=seed)
    if eager:
        kernels.install(model)
    else:
        attention.install(model)
    return model


def _serve(bench: Bench, temperature: float, longest: int = 30) -> list[list[int]]:
    random_ = random.Random(4)
    for number in range(REQUESTS):
        prompt = [random_.randrange(3, 250) for _ in range(random_.randrange(1, longest))]
        bench.submit(str(number), prompt, TOKENS, temperature=temperature, seed=number)
        for _ in range(random_.randrange(6)):
            if not bench.core.idle:
                bench.step()
    bench.drain()
    return [bench.tokens(str(number)) for number in range(REQUESTS)]


@cache
def _without_drafts(kind: TinyKind, temperature: float, longest: int = 30) -> list[list[int]]:
    return _serve(Bench(_model(kind, 6)), temperature, longest)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("kind", "draft_kind", "seed", "least", "most"),
    [
        ("llama", "llama", 6, 0.95, 1.0),
        ("gemma3", "gemma3", 6, 0.95, 1.0),
        ("llama", "gemma3", 1, 0.0, 0.3),
        ("lfm2", "llama", 1, 0.0, 0.3),
    ],
)
def test_tokens_are_those_without_drafts(
    kind: TinyKind,
    draft_kind: TinyKind,
    seed: int,
    least: float,
    most: float,
    temperature: float,
) -> None:
    bench = Bench(_model(kind, 6), draft=5, draft_model=_model(draft_kind, seed))
    verify_any(bench.core)
    assert _serve(bench, temperature) == _without_drafts(kind, temperature)
    accepted = sum(sum(stats.accepted_tokens) for stats in bench.stats)
    proposed = sum(stats.draft_tokens for stats in bench.stats)
    assert proposed > 60
    assert least <= accepted / proposed <= most


@pytest.mark.slow
def test_a_model_on_the_host_drafts_for_itself() -> None:
    model = _model("llama", 6, eager=True)
    expected = _serve(Bench(model, eager=True), 0.0)
    bench = Bench(model, eager=True, draft=5, draft_model=_model("llama", 6, eager=True))
    verify_any(bench.core)
    assert _serve(bench, 0.0) == expected
    assert sum(sum(stats.accepted_tokens) for stats in bench.stats) > 60


def test_long_prompts_reach_the_draft_model_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model_module, "MAX_CATCH_UP", 15)
    bench = Bench(_model("llama", 6), draft=5, draft_model=_model("llama", 6))
    verify_any(bench.core)
    assert _serve(bench, 0.0, longest=60) == _without_drafts("llama", 0.0, longest=60)
    assert sum(sum(stats.accepted_tokens) for stats in bench.stats) > 10


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_caches_of_a_draft_model_keep_to_the_memory(kind: TinyKind) -> None:
    """Many short rows and a long one had taken the product of both, many times the memory."""
    requests = [(f"short {number}", 2 + number, 40) for number in range(12)]
    requests += [("long", 300, 30), ("longer", 600, 30), ("last", 3, 30)]
    served: list[list[list[int]]] = []
    size = Bench(_model(kind, 6)).core.limits.bytes_alone(900)
    for draft_model in (None, _model(kind, 6)):
        bench = Bench(
            _model(kind, 6), rows=12, tokens=200, draft=5, draft_model=draft_model, kv=size
        )
        verify_any(bench.core)
        limits, drafter = bench.core.limits, bench.core.speculator._drafter
        most = limits.kv_bytes // limits.geometry.bytes_per_token
        sizes: set[tuple[int, int]] = set()
        for name, length, count in requests:
            bench.submit(name, [3 + number * 7 % 60 for number in range(length)], count)
        while not bench.core.idle:
            bench.step()
            if isinstance(drafter, draft_model_module.DraftModel):
                sizes.add(drafter._cache.capacity)
                assert drafter._cache.nbytes <= limits.kv_bytes
        served.append([bench.tokens(name) for name, _, _ in requests])
    assert served[0] == served[1]
    assert max(rows for rows, _ in sizes) > 8
    assert max(columns for _, columns in sizes) > 600
    assert all(rows * columns <= most for rows, columns in sizes)
    accepted = {name: sum(o.accepted for o in bench.outputs[name, 0]) for name, _, _ in requests}
    assert accepted["long"] > 2
    assert accepted["longer"] > 2


def _started(path: Path, draft: Path, **settings: Any) -> EngineCore:
    speculative = SpeculativeConfig("draft_model", str(draft))
    config = EngineConfig(
        model=str(path), speculative=speculative, kv_memory=1 << 24, max_rows=4, **settings
    )
    core, _ = start_core(config, resolve(str(path)), lambda progress: None)
    return core


def test_a_configured_draft_model_is_loaded(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    core = _started(path, path)
    verify_any(core)
    core.submit(Submit("0", [5, 6, 7], SamplingParams(20, 0, temperature=0.0)))
    accepted = 0
    while not core.idle:
        accepted += sum(core.step().stats.accepted_tokens)
    assert accepted > 5


def test_nothing_is_proposed_beyond_the_draft_models_context(tmp_path: Path) -> None:
    """A model with learned positions would read memory behind its last one."""
    path, draft = (tiny_model_dir(tmp_path / name, "llama") for name in ("model", "draft"))
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 50}))
    core = _started(path, draft)
    verify_any(core)
    drafter = core.speculator._drafter
    assert isinstance(drafter, draft_model_module.DraftModel)
    core.submit(Submit("0", [5, 6, 7], SamplingParams(90, 0, temperature=0.0)))
    core.submit(Submit("1", [8] * 60, SamplingParams(90, 0, temperature=0.0)))
    longest = 0
    while not core.idle:
        core.step()
        longest = max(longest, *(len(row.fed) for row in drafter._rows.values()), 0)
    assert 40 < longest <= 50


@pytest.mark.slow
def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "llama")
    recurrent = tiny_model_dir(tmp_path, "lfm2")
    with pytest.raises(ModelError, match="recurrent"):
        _started(path, recurrent)
    with pytest.raises(ModelError, match="vocabulary"):
        _started(path, Path(resolve(DEFAULT_MODEL).path))
    with pytest.raises(ModelError, match="nowhere"):
        _started(path, tmp_path / "nowhere")


@pytest.mark.parametrize("settings", [{"method": "draft_model"}, {"method": "ngram", "model": "a"}])
def test_the_method_and_the_model_belong_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="model"):
        SpeculativeConfig(**settings)
