"""Adapters of fused blocks and in compiled steps, with the CPU's operations for CUDA's kernels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.tuner.utils import load_adapters
from support.engine.adapters import matrices, write_mlx
from support.engine.core import build_core
from support.engine.on_cuda import (
    LOW_RANK_CALLS,
    ComparedSteps,
    kernels,
    low_rank_kernel,
)
from support.engine.pages import HostPages
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.engine.core.core import EngineCore
from chairlift.engine.cuda import block as cuda_block
from chairlift.engine.messages import AdapterLoaded, LoadAdapter, SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.paged.compiled import STEADY
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.trials.probe import probe
from chairlift.scheduler.limits import Limits

__all__ = ["kernels", "low_rank_kernel"]

# Layers of each adapter: whole groups of fused layers, parts of groups, and all.
SUFFIXES = [("proj",), ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("o_proj", "down_proj")]


class Served:
    """An engine with fused blocks, and what mlx-lm gives for its adapters."""

    def __init__(self, kind: TinyKind, bits: int | str | None, path: Path) -> None:
        self._kind, self._bits, self._path = kind, bits, path
        model = self._new_model()
        attention.install(model)
        cuda_block.install(model)
        geometry, vocabulary, _ = probe(model, kind)
        limits = Limits(5, 40, 1 << 24, geometry)
        self.core: EngineCore = build_core(
            model, vocabulary, limits, kernels=HostPages(traceable=True)
        )
        forward = self.core.pipeline.forward
        assert isinstance(forward, PagedForward)
        forward._adapted_steps = self.steps = ComparedSteps(forward._logits, forward.routing)
        forward._steps = ComparedSteps(forward._logits)
        self._tokens: dict[str, list[int]] = {}

    def load(self, key: str, seed: int) -> None:
        folder = self._write(seed)
        loaded = self.core.load_adapter(LoadAdapter(key, str(folder)))
        assert isinstance(loaded, AdapterLoaded), loaded

    def submit(self, name: str, prompt: list[int], count: int, adapter: str) -> None:
        self._tokens[name] = []
        params = SamplingParams(max_tokens=count, seed=0, temperature=0.0)
        self.core.submit(Submit(name, prompt, params, adapter=adapter))

    def step(self) -> None:
        for output in self.core.step().outputs:
            self._tokens[output.request_id] += output.token_ids

    def drain(self) -> dict[str, list[int]]:
        while not self.core.idle:
            self.step()
        return self._tokens

    def expected(
        self, prompt: list[int], count: int, seed: int | None, guess: list[int]
    ) -> list[int]:
        """The tokens of mlx-lm with one adapter, or with None; see ``solo_tokens``."""
        alone = self._new_model()
        if seed is not None:
            alone = load_adapters(alone, str(self._write(seed)))
        return solo_tokens(alone, prompt, count, guess)

    def _new_model(self) -> Any:
        model = tiny_model(self._kind, seed=3)
        if isinstance(self._bits, str):
            nn.quantize(model, mode=self._bits)
        elif self._bits is not None:
            nn.quantize(model, 32, self._bits)
        return model

    def _write(self, seed: int) -> Path:
        changed = matrices(self._new_model(), seed, 2 + seed % 3, SUFFIXES[seed % len(SUFFIXES)])
        return write_mlx(self._path / str(seed), changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits", "kernel"),
    [
        *(("llama", None, True), ("qwen3", None, False), ("qwen2", 8, False)),
        *(("qwen2", None, True), ("llama", "mxfp8", False)),
    ],
)
def test_fused_blocks_and_compiled_steps_have_each_rows_adapter(
    kind: TinyKind,
    bits: int | str | None,
    kernel: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    kernels: None,
) -> None:
    """While rows of five adapters and of none join and leave."""
    LOW_RANK_CALLS.clear()
    if kernel:
        request.getfixturevalue("low_rank_kernel")
    served = Served(kind, bits, tmp_path)
    random_ = random.Random(kind)
    for seed in range(5):
        served.load(f"a{seed}", seed)
    requests = []
    for number in range(9):
        prompt = [random_.randrange(3, 250) for _ in range(random_.randint(1, 30))]
        seed = None if number % 4 == 3 else number % 5
        requests.append((prompt, random_.choice([3, 6 * STEADY]), seed))
    for number, (prompt, count, seed) in enumerate(requests):
        served.submit(str(number), prompt, count, "" if seed is None else f"a{seed}")
        for _ in range(random_.randint(0, 6)):
            served.step()
    tokens = served.drain()
    for number, request in enumerate(requests):
        got = tokens[str(number)]
        assert got == served.expected(*request, got), request
    assert served.steps.compared > STEADY
    assert bool(LOW_RANK_CALLS) == kernel


@pytest.mark.slow
def test_a_compiled_step_does_not_keep_unloaded_adapters(tmp_path: Path, kernels: None) -> None:
    served = Served("llama", None, tmp_path)
    prompt, count = [5, 6, 7], 3 * STEADY
    seen = set()
    for seed in (0, 4, 1):  # of different ranks and layers
        served.load("a", seed)
        served.submit(str(seed), prompt, count, "a")
        tokens = served.drain()[str(seed)]
        assert tokens == served.expected(prompt, count, seed, tokens)
        seen.add(tuple(tokens))
        assert served.steps.compared > STEADY * len(seen)
        served.core.unload_adapter("a")
        assert not served.steps._seen, "their matrices can be freed"
    assert len(seen) == 3
