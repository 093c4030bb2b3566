"""An engine whose caches are pages, with NumPy instead of CUDA's kernels."""

from __future__ import annotations

import gc
import random
from typing import Any

import mlx.core as mx
import pytest
from support.engine.core import build_core
from support.engine.pages import HostPages
from support.engine.reference import solo_tokens
from support.tiny import TinyKind, tiny_model

from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.layer import PagedLayer
from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.core import EngineCore
from chairlift.engine.messages import Abort, SamplingParams, Submit
from chairlift.engine.model import attention
from chairlift.engine.model.trials.probe import probe
from chairlift.scheduler.limits import Limits

pytestmark = pytest.mark.usefixtures("small_blocks")


def _core(
    kind: TinyKind,
    kv_tokens: int,
    prefix: int = 0,
    swap: bool = False,
    rows: int = 4,
    layers: int | None = None,
) -> EngineCore:
    model = tiny_model(kind, layers=layers)
    attention.install(model)
    geometry, vocabulary, layers = probe(model, kind)
    limits = Limits(rows, 12 + rows, kv_tokens * geometry.bytes_per_token, geometry)
    kinds = [layer.kind for layer in layers]
    return build_core(
        model,
        vocabulary,
        limits,
        prefix_bytes=prefix * geometry.bytes_per_token,
        swap=Swap(kinds, 1 << 30) if swap else None,
        kernels=HostPages(),
    )


def _pools(core: EngineCore) -> list[Any]:
    (band,) = core.batch.bands
    assert isinstance(band, PagedBatch)
    return list(band.memory.pools.values())


@pytest.mark.slow
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("prefix", [0, 80])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_tokens_equal_the_solo_tokens(kind: TinyKind, prefix: int, swap: bool) -> None:
    """While rows join, share, outgrow their pages, are preempted and aborted."""
    core = _core(kind, 6 * PAGE_TOKENS, prefix, swap)
    expected = tiny_model(kind)
    rng = random.Random(f"{kind}{prefix}{swap}")
    prompts = [[rng.randrange(3, 250) for _ in range(rng.randint(1, 24))] for _ in range(12)]
    prompts[9] = prompts[2] + [5, 6]
    prompts[11] = [*prompts[4][: len(prompts[4]) // 2 + 1], 9]
    # The first ones are long and arrive together, so that some are preempted.
    lengths = [36 if number < 4 else rng.randint(1, 15) for number in range(len(prompts))]
    choices = [rng.choice([1, 1, 2]) for _ in prompts]
    tokens: dict[tuple[str, int], list[int]] = {}
    waiting = list(enumerate(prompts))
    preempted = 0
    while waiting or not core.idle:
        if waiting and (len(waiting) > 8 or rng.random() < 0.6):
            number, prompt = waiting.pop(0)
            params = SamplingParams(max_tokens=lengths[number], seed=0, temperature=0.0)
            core.submit(Submit(str(number), prompt, params, choices[number]))
        if rng.random() < 0.01:
            core.abort(Abort("3", "abort"))
        output = core.step()
        preempted += output.stats.preemptions
        for part in output.outputs:
            tokens.setdefault((part.request_id, part.index), []).extend(part.token_ids)
        for band in core.batch.bands:
            band.check_integrity()
    for number, prompt in enumerate(prompts):
        first = tokens.get((str(number), 0), [])
        solo = solo_tokens(expected, prompt, lengths[number], first)
        for index in range(choices[number]):
            batched = tokens.get((str(number), index), [])
            assert batched == solo[: len(batched)], number
            assert number == 3 or len(batched) == lengths[number]
    assert preempted
    core.prefixes._tree.clear()
    assert not any(pool.used for pool in _pools(core)), "a page was lost"


@pytest.mark.slow
def test_prefixes_give_way_to_rows() -> None:
    """Short prefixes fill more pages than their bytes; they are dropped when rows need pages."""
    core = _core("llama", 8 * PAGE_TOKENS, prefix=4 * PAGE_TOKENS, layers=1)
    for number in range(60):
        params = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
        core.submit(Submit(str(number), [3 + number, 7, 9], params))
        while not core.idle:
            core.step()
    params = SamplingParams(max_tokens=PAGE_TOKENS, seed=0, temperature=0.0)
    for number in range(4):
        core.submit(Submit(f"long{number}", [number + 3] * 10, params))
    while not core.idle:
        core.step()
    assert core.prefixes._tree.evictions


def test_many_rows_store_a_shared_prompt_once() -> None:
    core = _core("llama", 40 * PAGE_TOKENS, prefix=40 * PAGE_TOKENS)
    prompt = [3 + i % 200 for i in range(6 * PAGE_TOKENS)]
    params = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
    core.submit(Submit("first", [*prompt, 5], params))
    while not core.idle:
        core.step()
    for number in range(4):
        core.submit(Submit(str(number), [*prompt, 6 + number], params))
    reserved = 0
    while not core.idle:
        reserved = max(reserved, core.step().stats.kv_reserved_bytes)
    (band,) = core.batch.bands
    assert isinstance(band, PagedBatch)
    assert reserved == (6 + 4) * band.memory.page_bytes(None)


def test_the_pages_of_a_prefix_count_once_for_all_its_rows() -> None:
    """Rows that share a prompt run together in memory that has room for it only once."""
    core = _core("llama", 16 * PAGE_TOKENS, prefix=16 * PAGE_TOKENS)
    prompt = [3 + i % 200 for i in range(6 * PAGE_TOKENS)]
    params = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
    core.submit(Submit("first", [*prompt, 5], params))
    while not core.idle:
        core.step()
    for number in range(4):
        core.submit(Submit(str(number), [*prompt, 6 + number], params))
    rows = preempted = 0
    while not core.idle:
        stats = core.step().stats
        rows, preempted = max(rows, stats.running), preempted + stats.preemptions
    assert (rows, preempted) == (4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_with_prefixes_of_a_tree_never_lack_pages(seed: int, swap: bool) -> None:
    """Random prompts with parts in common, in memory for few of them."""
    rng = random.Random(seed)
    # One layer: its tokens are not looked at.
    core = _core("llama", 11 * PAGE_TOKENS, prefix=6 * PAGE_TOKENS, swap=swap, rows=8, layers=1)
    parts = [[rng.randrange(3, 250) for _ in range(rng.randint(8, 40))] for _ in range(4)]
    waiting, ended, shared = 40, 0, 0
    while waiting or not core.idle:
        if waiting and rng.random() < 0.3:
            waiting -= 1
            common = sum(rng.sample(parts[1:], rng.randint(0, 2)), list(parts[0]))
            prompt = [*common[: rng.randint(1, 80)], rng.randrange(3, 250)]
            params = SamplingParams(max_tokens=rng.randint(1, 24), seed=0, temperature=0.0)
            core.submit(Submit(str(waiting), prompt, params, rng.choice([1, 1, 1, 2])))
        output = core.step()
        ended += sum(part.finish is not None for part in output.outputs)
        assert not any(part.finish == "error" for part in output.outputs)
        pages = [page for row in core.scheduler.running for page in row.pages]
        shared = max(shared, len(pages) - len(set(pages)))
        for band in core.batch.bands:
            band.check_integrity()
    assert ended >= 40
    assert shared, "no two rows shared a prefix"


def _with_pages(kind: TinyKind, pages: int) -> EngineCore:
    """An engine with so many pages in each pool; prefixes have less memory than a page."""
    for tokens in range((pages + 1) * PAGE_TOKENS, 99 * PAGE_TOKENS):
        core = _core(kind, tokens, prefix=PAGE_TOKENS - 1, rows=8)
        if min(core.limits.page_memory.budget.usable) >= pages:
            return core
    raise AssertionError("not so many pages")


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", range(4))
def test_a_prefix_that_ends_within_a_page(kind: TinyKind, seed: int, alone: bool) -> None:
    """That page is copied while it is held, also where the pages suffice for nothing but the rows.

    Beside another row the prompt waits then; alone it begins without its prefix.
    """
    rng = random.Random(seed)
    before, beside = ([rng.randrange(3, 250) for _ in range(40)] for _ in range(2))
    cached = rng.randint(1, PAGE_TOKENS - 4)
    prompt = [*before[:cached], 7] if not alone else [*before[:cached], *beside[:PAGE_TOKENS]]
    needed = -(-(len(prompt) + 1) // PAGE_TOKENS)
    core = _with_pages(kind, needed if alone else 2 + needed)
    tokens: dict[str, list[int]] = {}

    def submit(name: str, prompt: list[int], count: int) -> None:
        params = SamplingParams(max_tokens=count, seed=0, temperature=0.0)
        core.submit(Submit(name, prompt, params))

    def step() -> None:
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)

    submit("before", before[: cached + 2], 2)
    while not core.idle:
        step()
    if not alone:
        submit("beside", beside[: PAGE_TOKENS + 2], PAGE_TOKENS - 2)
        step()
        step()
    submit("prompt", prompt, 2)
    while not core.idle:
        step()
    expected = tiny_model(kind)
    assert tokens["prompt"] == solo_tokens(expected, prompt, 2)
    if not alone:
        right = solo_tokens(expected, beside[: PAGE_TOKENS + 2], PAGE_TOKENS - 2)
        assert tokens["beside"] == right


def test_a_chunk_is_dispatched_while_the_step_before_runs() -> None:
    core = _core("llama", 16 * PAGE_TOKENS)
    _submit_one(core)
    core.step()
    core.step()
    assert core.pipeline.running.queued
    assert core.batch.queued


@pytest.mark.slow
def test_a_step_leaves_no_cycles() -> None:
    """Arrays of a step are freed at once, not when Python collects its garbage."""
    core = _core("llama", 16 * PAGE_TOKENS)
    _submit_one(core)
    core.step()
    gc.collect()
    gc.disable()
    try:
        core.step()
        layers = [found for found in gc.get_objects() if isinstance(found, PagedLayer)]
        assert not layers
    finally:
        gc.enable()


def _submit_one(core: EngineCore) -> None:
    params = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
    core.submit(Submit("a", list(range(3, 63)), params))


def test_without_a_kernel_for_its_heads_a_model_reads_copies_of_pages() -> None:
    class NoKernels(HostPages):
        def attend(self, *given: Any) -> mx.array:
            raise ValueError("no kernel for heads of 16")

    model = tiny_model("llama")
    attention.install(model)
    geometry, vocabulary, _ = probe(model, "llama")
    core = build_core(model, vocabulary, Limits(4, 16, 1 << 24, geometry), kernels=NoKernels())
    assert core.batch.queued
    assert core.pipeline.forward.splits
