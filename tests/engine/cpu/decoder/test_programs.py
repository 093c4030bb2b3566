"""A program computes what its jobs compute one at a time, to the last bit, on any threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conformance.configs import tiny_args
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.kv import filled_batch

from chairlift.cache.batch import BatchCache
from chairlift.cache.packed.step import BatchStep, packed
from chairlift.cache.quantized import HalfPrecision
from chairlift.cache.speculation import Speculation
from chairlift.engine.cpu import host_linear, kernels
from chairlift.engine.cpu.compiled import compiled_elementwise, compiled_matmul, jobs, row_attention
from chairlift.engine.cpu.compiled.compiled_matmul import CompiledMatrix
from chairlift.engine.cpu.compiled.jobs import NoProgramError
from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.compiled.worker_threads import shared
from chairlift.engine.cpu.decoder import install as decoder
from chairlift.engine.cpu.decoder import layer as decoder_layer
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.program_builder import ProgramBuilder

pytestmark = pytest.mark.skipif(
    not compiled_matmul.available(), reason="llvmlite is not installed, or not for this CPU"
)
FORMS = ["llama", "qwen2", "qwen3", "gemma3_text"]


@pytest.fixture(autouse=True)
def _small_jobs_are_shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_matmul, "MIN_SHARED_WEIGHTS", 1 << 8)
    for module in (compiled_elementwise, row_attention):
        monkeypatch.setattr(module, "MIN_SHARED", 1 << 8)
    before = shared.get()
    yield
    shared.set(before)


class Chain:
    """A product, a bias, a norm of each head, a sum and a gate, each reading the one before."""

    def __init__(self, tokens: int, heads: int, width: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        outputs = heads * width
        self.matrix = CompiledMatrix([mx.array(normal(outputs, 48))])
        self.x, self.bias, self.other = normal(tokens, 48), normal(outputs), normal(tokens, outputs)
        self.weight, self.eps = normal(width), np.array([1e-5], np.float32)
        self.shape = tokens, heads, width
        build = self.build = ProgramBuilder()
        product = build.product("product", self.matrix, self.x)
        build.sum(product, self.bias, product)
        by_head = product.reshape(self.shape)
        build.norm(by_head, self.weight, self.eps, by_head)
        self.sum = build.sum(self.other, product, build.array("sum", tokens, outputs))
        self.result = build.gated("swiglu", "gated", self.sum, self.other)

    def expected(self) -> Floats:
        """The same by one call at a time."""
        product = self.matrix(self.x) + self.bias
        by_head = compiled_elementwise.norm(product.reshape(self.shape), self.weight, self.eps)
        assert by_head is not None
        added = self.other + by_head.reshape(product.shape)
        gated = compiled_elementwise.gated("swiglu", added, self.other)
        assert gated is not None
        return gated


@given(
    tokens=st.integers(1, 20),
    heads=st.integers(1, 3),
    registers=st.integers(1, 3),
    threads=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_a_program_computes_what_its_jobs_compute(
    tokens: int, heads: int, registers: int, threads: list[int], seed: int
) -> None:
    chain = Chain(tokens, heads, 16 * registers, seed)
    for count in threads:  # the number may change between runs
        shared.set(count)
        chain.result[...] = np.nan
        chain.build.program.run()
        assert np.array_equal(chain.result, chain.expected())


def test_programs_of_several_threads_do_not_disturb_each_other() -> None:
    """One of them has the worker threads; the others compute alone."""
    shared.set(3)
    wrong = []

    def compute(seed: int) -> None:
        chain = Chain(5, 2, 32, seed)
        expected = chain.expected()
        for _ in range(300):
            chain.result[...] = np.nan
            chain.build.program.run()
            if not np.array_equal(chain.result, expected):
                wrong.append(seed)

    threads = [threading.Thread(target=compute, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_changed_job_reads_its_new_arguments() -> None:
    shared.set(2)
    first, second = (np.full((3, 32), n, np.float32) for n in (1, 2))
    build, result = ProgramBuilder(), np.empty((3, 32), np.float32)
    build.sum(first, first, result)
    build.program.run()
    assert (result == 2).all()
    kernel = llvm_kernel.compiled()
    assert kernel is not None
    arguments = (first.ctypes.data, second.ctypes.data, result.ctypes.data, 32, 32, 32, 32)
    build.program.change(0, kernel.add, *arguments, parts=3, is_shared=True)
    build.program.run()
    assert (result == 3).all()


def test_numbers_that_do_not_fill_registers_have_no_program() -> None:
    odd = np.ones((2, 17), np.float32)
    build = ProgramBuilder()
    for add in (
        partial(build.sum, odd, odd, odd),
        partial(build.norm, odd, odd[0], odd[0, :1], odd),
        partial(build.gated, "swiglu", "gated", odd, odd),
        partial(build.rotated, "rotated", odd[:, None], odd, odd),
    ):
        with pytest.raises(NoProgramError):
            add()


@pytest.mark.slow
@pytest.mark.parametrize("storage", [None, HalfPrecision()])
@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("name", FORMS)
def test_steps_by_programs_are_identical_to_those_without(
    name: str, dim: int, storage: HalfPrecision | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows and drafts of any lengths; heads of 16 fill no registers on some CPUs."""
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)
    model = _model(name, dim)
    used = _Count(monkeypatch)
    one, other = (_filled(model, storage) for _ in range(2))
    rng = random.Random(dim)
    for step in range(14):
        shared.set(rng.choice([1, 2, 3]))
        counts = [rng.choice([1, 1, 1, 2, 5, 20]) for _ in range(len(one))]
        fed = mx.array([rng.randrange(1, 20) for _ in range(sum(counts))])[:, None]
        kept = [rng.randint(1, count) for count in counts]
        ours = _step(model, one, counts, fed, kept)
        with monkeypatch.context() as patch:
            patch.setattr(decoder_layer, "MAX_TOKENS", 0)
            theirs = _step(model, other, counts, fed, kept)
        assert mx.array_equal(ours, theirs), step
    assert used.programs > 0 or dim == 16


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3"])
def test_attention_is_part_of_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)
    model = _model(name, 64)
    batch = _filled(model)
    tokens = mx.array([[1], [2], [3]])
    _step(model, batch, [1, 1, 1], tokens, [1, 1, 1])  # MLX writes to windows that joined just now
    used = _Count(monkeypatch)
    _step(model, batch, [1, 1, 1], tokens, [1, 1, 1])
    full = [layer.ring.window is None for layer in batch.attention]
    assert all(full) if name == "qwen3" else 0 < sum(full) < len(full)
    # Layers of one kind that follow each other are computed at once.
    assert used.programs == 1 + sum(now != before for before, now in pairwise(full))


class _Count:
    """Counts the programs that run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs = 0
        for kind in (jobs.Program, jobs.ProgramChain):
            monkeypatch.setattr(kind, "run", self._counted(kind.run))

    def _counted(self, run: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any) -> None:
            self.programs += 1
            run(*arguments)

        return counted


def _model(name: str, dim: int) -> Any:
    module, args = tiny_args(name)
    args.head_dim, args.hidden_size = dim, args.num_attention_heads * dim
    mx.random.seed(1)
    model = module.Model(args)
    mx.eval(model.parameters())
    kernels.install(model, exactly=False)
    decoder.install(model)
    return model


def _filled(model: Any, storage: HalfPrecision | None = None) -> BatchCache:
    """Caches with three rows of different lengths, as a step before has left them."""
    batch = filled_batch(model, (3, 150, 1), storage)
    _step(model, batch, [1, 1, 1], mx.array([[1], [2], [3]]), [1, 1, 1])
    return batch


def _step(
    model: Any, batch: BatchCache, counts: list[int], fed: mx.array, kept: list[int]
) -> mx.array:
    """The logits of a packed step of which each row keeps some tokens."""
    draft = Speculation(batch)
    with packed([BatchStep(batch, counts, counts, draft.step)]) as layers:
        logits: mx.array = model(fed, cache=layers)[:, 0]
        mx.eval(logits)
    draft.commit(kept)
    mx.eval(batch.state)
    return logits
