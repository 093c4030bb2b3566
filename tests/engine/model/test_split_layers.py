"""Layers that mix tokens, in steps that pack the tokens of all sequences."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conformance.values import VOCAB
from conformance.weights import tiny_model
from support.engine.on_cuda import ComparedSteps
from support.engine.pages import HostPages

from chairlift.cache.kinds import Cache, make_batch, make_pages
from chairlift.cache.packed.split import Joint, places
from chairlift.cache.pages import step_parts
from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.pages.page import doubled
from chairlift.cache.pages.step_parts import PagedAttention
from chairlift.cache.ring import order_without
from chairlift.engine.model import attention, split
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.chunk import Chunk
from chairlift.engine.model.drafted import DraftedBand
from chairlift.engine.model.forward import Forward
from chairlift.engine.model.lora_routing import AdapterRun, Routing
from chairlift.engine.model.paged import forward as paged_forward
from chairlift.engine.model.paged.compiled import STEADY
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.selection import select_forward

# States alone, beside attention, in a list with it; states of tails only; models that regard the
# lengths of padded rows, and models that do not.
RECURRENT = ("lfm2", "qwen3_next", "granitemoehybrid", "falcon_h1", "jamba", "nemotron_h")
# Attention that pages' kernels do not compute: another layer selects the columns.
DENSE = ("deepseek_v32",)
# Attention that has a kernel of its own.
LATENT = ("deepseek_v3", "longcat_flash", "mistral4")
# Recurrent layers beside latent attention, and beside attention with a mask of the model.
MIXED = ("kimi_linear", "bailing_hybrid", "plamo2")

NO_ROWS = mx.zeros((0,), mx.int32)


@cache
def _model(name: str) -> Any:
    model = tiny_model(name)
    adapt(model)
    attention.install(model)
    split.install(model)
    return model


def _paged(model: Any, kernels: HostPages) -> tuple[Callable[[], Cache], PagedForward]:
    """Pages for a model, and what the engine would choose to call it."""
    choice = select_forward(model, partial(make_batch, model), partial(make_pages, model, kernels))
    assert choice.make_pages is not None
    assert isinstance(choice.forward, PagedForward)
    windows = {kind.window for kind in make_batch(model).kinds if not kind.recurrent}
    memory = choice.make_pages(dict.fromkeys(windows, 200))
    return partial(PagedBatch, memory), choice.forward


def _serve(
    forward: Forward, make: Callable[[], Cache], seed: int, alone: bool = False
) -> list[mx.array]:
    """The logits of a random run: prompts in random chunks beside rows, some with drafts.

    Args:
        alone: each row has a batch of its own.
    """
    rng = random.Random(seed)
    bands: list[Cache] = [] if alone else [make()]
    prompts: list[tuple[Cache, list[int]]] = []
    results: list[mx.array] = []
    for _ in range(10):
        for _ in range(rng.randrange(3)):
            prompt = make()
            prompt.join()
            prompts.append((prompt, [rng.randrange(1, VOCAB) for _ in range(rng.choice(LENGTHS))]))
        chunks = []
        for prompt, tokens in prompts:
            begin = prompt.offsets[0]
            part = tokens[begin : begin + rng.randrange(1, 40)]
            ends = begin + len(part) == len(tokens)
            chunks.append(Chunk(prompt, part, rng.randrange(1, 3) if ends else 0))
        count = sum(map(len, bands))
        drafting = rng.random() < 0.4 and count > 0
        longest = 5 if drafting else 2
        rows = [
            [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, longest))]
            for _ in range(count)
        ]
        kept = [rng.randrange(1, len(row) + 1) for row in rows]
        fed = mx.array([token for row in rows for token in row], mx.int32)
        shares = [slice(row, row + 1) for row in range(count)] if alone else [slice(count)]
        drafted = [DraftedBand(b, rows[own], ()) for b, own in zip(bands, shares, strict=True)]
        outcome = forward(bands, fed, chunks, (), drafted if drafting else [])
        for each, own in zip(drafted, shares, strict=True) if drafting else ():
            forward.commit(each, kept[own])
        if outcome.logits is not None:
            lines = len(fed) + sum(chunk.choices for chunk in chunks)
            results.append(outcome.logits[:lines])
        mx.eval(results, [band.state for band in bands], [cache.state for cache, _ in prompts])
        for chunk in chunks:
            if chunk.choices:
                state = chunk.cache.hand_over(0)
                for _ in range(chunk.choices):
                    bands += [make()] if alone else []
                    bands[-1].join(state)
        ended = {id(chunk.cache) for chunk in chunks if chunk.choices}
        prompts = [prompt for prompt in prompts if id(prompt[0]) not in ended]
        leaves = {row for row in range(sum(map(len, bands))) if rng.random() < 0.1}
        order = order_without(leaves, sum(map(len, bands)))
        if alone:
            bands = [bands[row] for row in order]
        else:
            bands[0].leave(leaves)
        for band in bands:
            mx.eval(band.take_moves(), band.state)
            band.check_integrity()
    return results


LENGTHS = [1, 2, 5, 30, 70]


@cache
def _separate(name: str, seed: int) -> list[mx.array]:
    """The logits of the same run where each row and each prompt has a call of its own."""
    model = _model(name)
    forward = Forward(model, None, packs=False)
    return _serve(forward, partial(make_batch, model), seed, alone=True)


class NoLatents(HostPages):
    """A device without a kernel for latent attention."""

    def attend_latent(self, *given: Any) -> mx.array:
        raise ValueError("no kernel for latent attention")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        *((name, HostPages) for name in (*RECURRENT, *DENSE, *LATENT, *MIXED)),
        *((name, NoLatents) for name in (*LATENT[:2], *MIXED[:2])),
    ],
)
def test_steps_over_pages_equal_separate_calls(name: str, kernels: type[HostPages]) -> None:
    model = _model(name)
    make, forward = _paged(model, kernels())
    if name in RECURRENT:
        assert forward.attention is PagedAttention.KERNEL
    else:
        latent = name in (*LATENT, *MIXED[:2]) and kernels is HostPages
        assert forward.attention is (PagedAttention.LATENT if latent else PagedAttention.DENSE)
    ours = _serve(forward, make, 4)
    for one, other in zip(ours, _separate(name, 4), strict=True):
        assert mx.allclose(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2", "longcat_flash", "plamo"])
def test_steps_over_columns_equal_separate_calls(name: str) -> None:
    model = _model(name)
    make = partial(make_batch, model)
    forward = select_forward(model, make).forward
    assert forward.splits
    ours = _serve(forward, make, 4)
    for one, other in zip(ours, _separate(name, 4), strict=True):
        assert mx.allclose(one, other, rtol=2e-3, atol=2e-3)


def test_a_layer_that_changes_the_heads_that_it_fetched_has_to_be_split() -> None:
    """Attention of a packed step reads the caches, which do not have such heads.

    With random weights the logits may differ too little for the trial.
    """
    model = _model("plamo")
    with pytest.raises(ValueError, match="4 heads of keys and values; caches have 2"):
        _serve(Forward(model, None, packs=True), partial(make_batch, model), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_linear"])
def test_rows_of_very_different_lengths_have_several_calls(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of all rows would copy as many columns for each as the longest has."""
    monkeypatch.setattr(step_parts, "column_bound", partial(doubled, 16))
    monkeypatch.setattr(step_parts, "MAX_WASTE", 1)
    calls: list[int] = []
    groups = step_parts.StepParts.dense_groups.func

    def counted(self: step_parts.StepParts) -> list[step_parts.DenseGroup]:
        result: list[step_parts.DenseGroup] = groups(self)
        calls.append(len(result))
        return result

    monkeypatch.setattr(step_parts.StepParts.dense_groups, "func", counted)
    model = _model(name)
    make, forward = _paged(model, NoLatents())
    ours = _serve(forward, make, 3)
    assert max(calls) > 3
    for one, other in zip(ours, _separate(name, 3), strict=True):
        assert mx.allclose(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "deepseek_v3", "kimi_linear"])
def test_compiled_steps_equal_others(name: str) -> None:
    """Also the states that they leave, which later steps begin with."""
    model = _model(name)
    make, forward = _paged(model, HostPages(traceable=True))
    forward._steps = steps = ComparedSteps(forward._logits)
    theirs: list[mx.array] = []
    ours: list[mx.array] = []
    plain = Forward(model, None, packs=False)
    for each, made, results in (
        (forward, make, ours),
        (plain, partial(make_batch, model), theirs),
    ):
        band: Cache = made()
        for tokens in ([5, 3, 9], [7] * 30):
            prompt: Cache = made()
            prompt.join()
            mx.eval(each([], NO_ROWS, [Chunk(prompt, tokens, 1)]).logits, prompt.state)
            band.join(prompt.hand_over(0))
        for number in range(2 * STEADY + 6):
            tokens = mx.array([1 + number, 2 + number], mx.int32)
            logits = each([band], tokens, []).logits
            assert logits is not None
            results.append(logits[:2])
            mx.eval(results, band.state)
    assert steps.compared > STEADY
    for one, other in zip(ours, theirs, strict=True):
        assert mx.allclose(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
def test_steps_with_prompts_are_compiled_with_latent_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In advance, too, as with other kernels over pages; no layer is called part by part."""
    # All columns are computed when a step is traced.
    monkeypatch.setattr(paged_forward, "COMPILED_TOKENS", 256)
    model = _model("deepseek_v3")
    make, forward = _paged(model, HostPages(traceable=True))
    forward._chunk_steps = steps = ComparedSteps(forward._logits)
    memory = make().memory  # type: ignore[attr-defined]
    forward.compile(memory, 2, 0, 80)
    in_advance = steps.compared
    assert in_advance >= 2
    for number in range(3):
        prompt: Cache = make()
        prompt.join()
        tokens = [(number + at) % VOCAB for at in range(70)]
        mx.eval(forward([], NO_ROWS, [Chunk(prompt, tokens, 1)]).logits)
        prompt.reset()
    assert steps.compared == in_advance + 3


def test_models_that_do_not_regard_lengths_have_a_call_for_each_prompt() -> None:
    for name, pads in (("lfm2", True), ("qwen3_next", True), ("jamba", False)):
        assert _paged(_model(name), HostPages())[1].pads == pads


def test_long_chunks_have_several_calls_if_the_model_keeps_its_scores() -> None:
    model = _model("deepseek_v3")
    make, forward = _paged(model, NoLatents())
    prompt = [1 + number % (VOCAB - 1) for number in range(90)]
    results = []
    for pairs in (None, 500):
        forward._max_pairs = pairs
        cache: Cache = make()
        cache.join()
        logits, scored, hidden = forward([], NO_ROWS, [Chunk(cache, prompt, 1, 60, True)])
        assert logits is not None
        assert (scored[0].shape[0], hidden[0].shape[0]) == (60, 90)
        results.append([logits[:1], scored[0], hidden[0]])
    for one, other in zip(*results, strict=True):
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(40))
def test_parts_are_taken_apart_and_joined(seed: int) -> None:
    """Whatever rows they have, in whatever order their tokens are, with tokens in no part."""
    rng = random.Random(seed)
    counts = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 9))]
    tokens = sum(counts) + rng.choice([0, 0, 3])
    begins = [sum(counts[:row]) for row in range(len(counts))]
    rows = list(range(len(counts)))
    if rng.random() < 0.5:
        rng.shuffle(rows)
    cuts = sorted(rng.sample(range(1, len(rows)), rng.randrange(len(rows))) if rows[1:] else [])
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        own = rows[start:stop]
        more = rng.choice([0, 2])
        parts.append(places([begins[r] for r in own], [counts[r] for r in own], len(own) + more))
    array = mx.random.normal((tokens, 1, 3), key=mx.random.key(seed))
    for part in parts:
        taken = np.array(part.taken(array))
        assert taken.shape == (part.rows, part.length, 3)
        flat = taken.reshape(-1, 3)
        expected = np.array(array)[part.tokens, 0]
        assert (flat == expected).all()
    joined = Joint(parts, tokens).joined(*(part.restored(part.taken(array)) for part in parts))
    used = sum(counts)
    assert mx.array_equal(joined[:used], array[:used])
    assert (joined[used:] == 0).all()


def test_a_row_without_tokens_takes_part() -> None:
    where = places([0, 0, 2, 2], [0, 2, 0, 1])
    assert where.numbers.tolist() == [0, 1, 2]
    assert (where.tokens < 3).all()


def test_tokens_of_a_part_keep_their_adapters() -> None:
    routing = Routing()
    with routing.route([AdapterRun(None, 2), AdapterRun(1, 3), AdapterRun(0, 1)]):
        outer = routing.call
        within = routing.within()
        for numbers, slots in (([4, 5, 0], [1, 0, -1]), ([2], [1])):
            with within(np.array(numbers)):
                assert routing.call is not None
                assert routing.call.own.tolist() == slots
        with within(np.array([0, 1])):
            assert routing.call is None
        assert routing.call is outer
    assert isinstance(routing.within()(np.array([0])), nullcontext)
