"""Rows of different adapters verify drafts with their own adapter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.engine.adapters import matrices, write_mlx
from support.engine.bench import Bench
from support.engine.drafts import oracles, verify_any
from support.tiny import TinyKind, tiny_model

from chairlift.engine.messages import AdapterLoaded, LoadAdapter
from chairlift.engine.model import attention

ADAPTERS = 3


def _load(bench: Bench, folder: Path) -> None:
    for number in range(ADAPTERS):
        loaded = bench.core.load_adapter(LoadAdapter(f"a{number}", str(folder / str(number))))
        assert isinstance(loaded, AdapterLoaded)


def _serve(bench: Bench, folder: Path) -> dict[str, list[list[int]]]:
    _load(bench, folder)
    random_ = random.Random(7)
    for number in range(9):
        prompt = [random_.randrange(3, 250) for _ in range(random_.randrange(1, 50))]
        adapter = f"a{number % 4}" if number % 4 < ADAPTERS else ""
        reading: dict[str, Any] = {"adapter": adapter}
        bench.submit(str(number), prompt, 24, temperature=0.5, reading=reading)
        for _ in range(random_.randrange(4)):
            bench.step()
    bench.drain()
    return {str(number): [bench.tokens(str(number))] for number in range(9)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_tokens_are_those_without_drafts(kind: TinyKind, tmp_path: Path) -> None:
    model = tiny_model(kind, seed=3)
    attention.install(model)
    for number in range(ADAPTERS):
        write_mlx(tmp_path / str(number), matrices(model, number, 3))
    expected = _serve(Bench(model), tmp_path)
    assert len({tuple(tokens) for [tokens] in expected.values()}) == 9
    bench = Bench(model, draft=4, propose=oracles(expected, 0.3))
    verified = verify_any(bench.core)
    assert _serve(bench, tmp_path) == expected
    assert len(verified) > 10


@pytest.mark.slow
def test_recurrent_states_are_replayed_with_the_rows_adapter_when_another_is_unloaded(
    tmp_path: Path,
) -> None:
    """While a step with drafts runs, which a recurrent layer partly takes back afterwards."""

    def serve(bench: Bench) -> dict[str, list[list[int]]]:
        _load(bench, tmp_path)
        for number in range(4):
            reading: dict[str, Any] = {"adapter": "a2"}
            bench.submit(str(number), [5, 6, 7 + number], 40, reading=reading)
        for unloaded in ("a0", "a1"):
            for _ in range(6):
                bench.step()
            bench.core.unload_adapter(unloaded)
        bench.drain()
        return {str(number): [bench.tokens(str(number))] for number in range(4)}

    model = tiny_model("lfm2", seed=3)
    attention.install(model)
    for number in range(ADAPTERS):
        write_mlx(tmp_path / str(number), matrices(model, number, 3))
    expected = serve(Bench(model))
    bench = Bench(model, draft=4, propose=oracles(expected, 0.3))
    verified = verify_any(bench.core)
    assert serve(bench) == expected
    assert len(verified) > 10
