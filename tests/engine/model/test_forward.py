"""One model call for rows and prompts gives the same results as separate calls."""

from __future__ import annotations

import random
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from support.tiny import TinyKind, tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import make_batch
from chairlift.engine.core.acceleration import accelerate
from chairlift.engine.model import attention
from chairlift.engine.model.chunk import Chunk
from chairlift.engine.model.forward import Forward
from chairlift.engine.model.head import Head
from chairlift.engine.model.selection import select_forward


def _model(kind: TinyKind, tied: bool = True) -> Any:
    model = tiny_model(kind, tied=tied)
    attention.install(model)
    return model


def _selected(model: Any, multiple: int = 1) -> Forward:
    make_cache = partial(make_batch, model)
    return select_forward(model, make_cache, multiple=multiple).forward


def _follow(forward: Forward, model: Any, seed: int) -> list[mx.array]:
    """Runs random prompts in random chunks beside random rows; returns all logits.

    Some prompts have their own tokens scored, too.
    """
    random_ = random.Random(seed)
    make = partial(make_batch, model)
    batch: BatchCache = make()
    prompts: list[tuple[BatchCache, list[int]]] = []
    results: list[mx.array] = []
    for _ in range(10):
        for _ in range(random_.randrange(3)):
            cache = make()
            cache.join(columns=40)
            prompts.append((cache, [random_.randrange(3, 250) for _ in range(1 + seed % 40)]))
        chunks = []
        for cache, tokens in prompts:
            size = random_.randrange(1, 16)
            ends = cache.offsets[0] + size >= len(tokens)
            part = tokens[cache.offsets[0] : cache.offsets[0] + size]
            scored = random_.choice([0, 0, len(part) - 1, len(part) - ends])
            chunks.append(Chunk(cache, part, random_.randrange(1, 3) if ends else 0, scored))
        fed = mx.array([random_.randrange(3, 250) for _ in range(len(batch))], mx.int32)
        logits, scores, _ = forward([batch], fed, chunks)
        expected = len(fed.tolist()) + sum(chunk.choices for chunk in chunks)
        if logits is None:
            assert expected == 0
        else:
            assert logits.shape[0] == expected
            results.append(logits)
        assert {n: len(part) for n, part in scores.items()} == {
            n: chunk.scored for n, chunk in enumerate(chunks) if chunk.scored
        }
        results += scores.values()
        mx.eval(results, batch.state, *(cache.state for cache, _ in prompts))
        for chunk in chunks:
            for _ in range(chunk.choices):
                batch.join(chunk.cache.extract(0))
        ended = {id(chunk.cache) for chunk in chunks if chunk.choices}
        prompts = [prompt for prompt in prompts if id(prompt[0]) not in ended]
        batch.leave({0} if len(batch) > 4 else set())
        mx.eval(batch.take_moves(), batch.state)
        batch.check_integrity()
    return results


@cache
def _separate(kind: TinyKind, tied: bool, seed: int) -> list[mx.array]:
    model = _model(kind, tied)
    return _follow(Forward(model, None, packs=False), model, seed)


@pytest.mark.slow
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_packed_steps_equal_separate_calls(kind: TinyKind, tied: bool, multiple: int) -> None:
    """With and without padding of the prompts' last chunks."""
    model = _model(kind, tied)
    together = _selected(model, multiple)
    assert together.packs
    assert together.selects_positions
    for seed in (3, 17, 38):
        ours = _follow(together, model, seed)
        for one, other in zip(ours, _separate(kind, tied, seed), strict=True):
            assert mx.allclose(one, other, rtol=1e-3, atol=1e-3)


class _Deviating(nn.Module):
    """A layer with logits that deviate where a call has tokens of several sequences side by side.

    Like that of a model file that reads what only plain calls have.
    """

    def __init__(self, inner: nn.Module, share: float) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def __call__(self, x: mx.array, *args: Any, **more: Any) -> mx.array:
        y: mx.array = self.inner(x, *args, **more)
        packed = x.shape[0] > 1 and x.shape[1] == 1
        return y + self.share * y.abs().mean() if packed else y


@pytest.mark.parametrize(
    ("dtype", "share", "tolerated"),
    [
        (mx.float32, 1e-4, True),
        (mx.float32, 0.05, False),
        (mx.bfloat16, 0.05, True),
        (mx.bfloat16, 0.4, False),
    ],
)
def test_a_packed_call_may_differ_by_the_rounding_of_the_models_type(
    dtype: mx.Dtype, share: float, tolerated: bool
) -> None:
    model = _model("llama")
    model.set_dtype(dtype)
    model.model.norm = _Deviating(model.model.norm, share)
    assert _selected(model).packs is tolerated


def test_models_with_recurrent_states_are_packed() -> None:
    """Only their recurrent layers are called once for the rows and once for each prompt."""
    model = _model("lfm2")
    forward = _selected(model)
    assert forward.packs
    assert not forward.splits
    assert forward.selects_positions
    plain = Forward(model, None, packs=False)
    for one, other in zip(_follow(forward, model, 21), _follow(plain, model, 21), strict=True):
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-3)


def test_a_model_with_its_own_attention_calls_it_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _model("llama")
    theirs: Any = llama.scaled_dot_product_attention
    monkeypatch.setattr(llama, "scaled_dot_product_attention", theirs.replaces)
    forward = _selected(model)
    assert forward.packs
    assert forward.splits
    plain = Forward(model, None, packs=False)
    for one, other in zip(_follow(forward, model, 5), _follow(plain, model, 5), strict=True):
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-3)


class _Neighbours(nn.Module):
    """A model that adds each token's embedding to the next one's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._inner = model
        self.layers = model.layers

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._inner(tokens, cache=cache)
        before = mx.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)
        return logits + 10 * before[:, -1:, None]


def test_a_model_that_mixes_neighbouring_tokens_is_not_packed() -> None:
    model = _Neighbours(_model("llama"))
    assert not _selected(model).packs


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_computes_selected_positions_only(tied: bool) -> None:
    model = _model("llama", tied)
    tokens = mx.array([[5, 9, 11, 4]])
    complete = model(tokens)
    head = Head(model)
    with head.select(mx.array([2, 3]), axis=1) as seen:
        selected = model(tokens)
    assert [x.shape for x in seen] == [(1, 4, 64)]
    assert selected.shape == (1, 2, complete.shape[2])
    assert mx.allclose(selected, complete[:, -2:], atol=1e-5)
    assert mx.allclose(model(tokens), complete, atol=1e-5)


def test_a_model_class_outside_of_any_module_is_accelerated() -> None:
    """mlx-lm executes a directory's own model file without importing it as a module."""
    names: dict[str, Any] = {"__name__": "a_file_of_a_directory"}
    exec(
        "from mlx_lm.models import llama\n"
        "class Model(llama.Model):\n"
        "    def __call__(self, *args, **kwargs):\n"
        "        return super().__call__(*args, **kwargs)\n",
        names,
    )
    model = tiny_model("llama", tied=True)
    model.__class__ = names["Model"]
    assert accelerate(model).eager == (mx.default_device() == mx.Device(mx.cpu))
