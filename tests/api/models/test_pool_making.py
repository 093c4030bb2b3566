"""What the pool is made of: names, parts of the memory, folders."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.api.simulated_models import Log
from support.tiny import tiny_model_dir

from chairlift.api.models import engine_loader
from chairlift.api.models.engine_loader import EngineLoader, LoaderTools
from chairlift.api.models.making import make_pool, own_folder
from chairlift.api.models.pool import ModelPool
from chairlift.api.models.spec import ModelsMemory, ModelSpec
from chairlift.api.settings import LoraSource, ServerSettings
from chairlift.engine.client.supervision import Supervision
from chairlift.engine.config import EngineConfig
from chairlift.engine.errors import AdapterError, ModelError
from chairlift.engine.hub.source import resolve
from chairlift.engine.messages import silent
from chairlift.engine.workers.pool import Workers
from chairlift.metrics.recorder import Recorder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("making"), "llama")


def spec_of(model: Path, name: str | None = None, **fields: Any) -> ModelSpec:
    config = EngineConfig(str(model), max_rows=2, kv_memory=fields.pop("kv_memory", None))
    return ModelSpec(config, ServerSettings(served_model_name=name), **fields)


def pool_of(*specs: ModelSpec, memory: int | None = None) -> ModelPool:
    tools = LoaderTools(Supervision(), Workers(), Workers(), Recorder("1.2"), lambda reason: None)

    async def make() -> ModelPool:
        return await make_pool(specs, ModelsMemory(memory), tools, Log())

    return asyncio.run(make())


def test_one_model_has_no_budget_and_its_own_name(tiny: Path) -> None:
    pool = pool_of(spec_of(tiny))
    assert pool.budget is None
    assert [(e.name, e.plan.memory) for e in pool.entries] == [("tiny-llama", 0)]
    limited = pool_of(spec_of(tiny), memory=1 << 30)
    assert limited.entries[0].plan.memory <= (limited.budget or 0) == 1 << 30


def test_several_models_share_the_memory(tiny: Path) -> None:
    specs = [spec_of(tiny, name, load="lazy", keep_alive=5.0) for name in "abc"]
    pool = pool_of(*specs, memory=1 << 30)
    parts = [entry.plan.memory for entry in pool.entries]
    assert len(set(parts)) == 1
    assert sum(parts) <= 1 << 30
    assert not any(entry.plan.is_eager for entry in pool.entries)
    assert {entry.plan.keep_alive for entry in pool.entries} == {5.0}
    # Without a size, they share what is free.
    assert (pool_of(*specs).budget or 0) > 1 << 28


def test_names_that_stand_for_two_models_are_refused(tiny: Path) -> None:
    for one, other in (
        (spec_of(tiny), spec_of(tiny)),
        (spec_of(tiny, "a"), spec_of(tiny, "b", aliases=("a",))),
    ):
        with pytest.raises(ModelError, match="two models have the name"):
            pool_of(one, other)


def test_an_adapter_has_no_models_name(tiny: Path) -> None:
    settings = ServerSettings(served_model_name="a", loras=(LoraSource("sql", tiny),))
    adapted = ModelSpec(EngineConfig(str(tiny)), settings)
    assert pool_of(adapted, spec_of(tiny, "b")).entries[0].adapters == ("sql",)
    for other in (spec_of(tiny, "sql"), spec_of(tiny, "b", aliases=("sql",))):
        with pytest.raises(ModelError, match="a model and a LoRA adapter have the name 'sql'"):
            pool_of(adapted, other)


def test_a_model_that_does_not_exist_or_fit_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        pool_of(spec_of(tiny), spec_of(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match="the model big needs"):
        pool_of(spec_of(tiny, "small"), spec_of(tiny, "big", kv_memory=1 << 40), memory=1 << 30)


def test_models_share_no_folder_of_prefixes(tiny: Path) -> None:
    plain = spec_of(tiny)
    config = replace(plain.config, prefix_cache_dir=Path("prefixes"))
    shared = replace(plain, config=config)
    assert own_folder(config, "org/a", [shared, plain]) == config
    folders = {own_folder(config, name, [shared, shared]).prefix_cache_dir for name in ("a/b", "a")}
    assert folders == {Path("prefixes/a%2Fb"), Path("prefixes/a")}
    assert own_folder(plain.config, "a", [plain, plain]) == plain.config


async def test_a_load_that_fails_ends_its_canary(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(model_info(), lambda request, index: Scripted([0]))
    monkeypatch.setattr(engine_loader, "make_client", lambda *args: engine)
    settings = ServerSettings(canary_interval=60.0, loras=(LoraSource("adapter", tiny),))
    spec = ModelSpec(EngineConfig(str(tiny)), settings)
    workers = Workers()
    tools = LoaderTools(Supervision(), workers, workers, Recorder("1.2"), lambda reason: None)
    loader = EngineLoader("tiny", spec, spec.config, resolve(str(tiny)), tools)
    before = asyncio.all_tasks()
    try:
        with pytest.raises(AdapterError):  # the engine takes no adapters
            await loader.load(silent)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
    finally:
        workers.close()
