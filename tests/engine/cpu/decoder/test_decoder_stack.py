"""Decoder layers that are computed at once: only those of models that just call one by one."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conformance.configs import tiny_args
from mlx.utils import tree_map
from support.engine.kv import filled_batch

from chairlift.cache.batch import BatchCache
from chairlift.cache.packed.host_step import host_step
from chairlift.engine.cpu import host_linear, kernels
from chairlift.engine.cpu.compiled import compiled_matmul
from chairlift.engine.cpu.compiled.jobs import ProgramChain
from chairlift.engine.cpu.decoder import install as decoder
from chairlift.engine.cpu.decoder import layer, stack

pytestmark = pytest.mark.skipif(
    not compiled_matmul.available(), reason="llvmlite is not installed, or not for this CPU"
)
TOKENS = mx.array([[1], [2], [3]])


@pytest.fixture(autouse=True)
def _all_products_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_linear, "MIN_WEIGHTS", 0)


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The first and last layer of each call that computes several."""
    calls: list[tuple[int, int]] = []
    run = ProgramChain.run

    def recorded(chain: ProgramChain, start: int, stop: int) -> None:
        calls.append((start, stop - 1))
        run(chain, start, stop)

    monkeypatch.setattr(ProgramChain, "run", recorded)
    return calls


def built(module: Any, args: Any, replaced: bool) -> Any:
    mx.random.seed(1)
    model = module.Model(args)
    # The products' weights are rounded to bfloat16, so all are.
    rounded: Any = tree_map(
        lambda weight: weight.astype(mx.bfloat16).astype(mx.float32), model.parameters()
    )
    model.update(rounded)
    mx.eval(model.parameters())
    if replaced:
        kernels.install(model, exactly=False)
        decoder.install(model)
    return model


def models(name: str = "qwen3") -> tuple[Any, Any]:
    """A model whose layers are replaced, and the same as it was."""
    module, args = tiny_args(name)
    args.head_dim, args.hidden_size = 64, args.num_attention_heads * 64
    return built(module, args, True), built(module, args, False)


def step(model: Any, batch: BatchCache, tokens: mx.array = TOKENS) -> mx.array:
    with batch.step(1):
        logits: mx.array = model(tokens, cache=batch.layers)
        mx.eval(logits, batch.state)
    return logits


def assert_same(ours: Any, plain: Any, steps: int = 3) -> None:
    one, other = (filled_batch(model, (3, 40, 1)) for model in (ours, plain))
    for number in range(steps):
        tokens = (TOKENS + number) % 20
        logits = step(ours, one, tokens), step(plain, other, tokens)
        assert mx.allclose(*logits, rtol=1e-3, atol=1e-3), number
    assert all(mx.allclose(*both, atol=1e-3) for both in zip(one.state, other.state, strict=True))


def test_layers_are_computed_at_once(chains: list[tuple[int, int]]) -> None:
    ours, plain = models()
    chains.clear()
    assert_same(ours, plain)
    assert chains == [(0, 3)] * 3


def test_layers_without_programs_are_called_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example without the extra ``jit``."""
    monkeypatch.setattr(layer, "MAX_TOKENS", 0)
    ours, plain = models()
    kind = type(ours.layers[0])
    assert not stack.install(ours)
    assert type(ours.layers[0]) is kind
    assert kind.__call__.__module__ == layer.__name__
    assert_same(ours, plain)


def test_no_buffer_is_viewed_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX would copy it instead of writing into it."""
    views: list[weakref.ref[Any]] = []

    def noted(*arguments: Any) -> Any:
        found = host_step(*arguments)
        if found is not None:
            buffers = found.places.keys, found.places.values
            views.extend(weakref.ref(buffer) for buffer in buffers)
        return found

    for module in (layer, stack):
        monkeypatch.setattr(module, "host_step", noted)
    ours, _ = models()
    batch = filled_batch(ours, (3, 40, 1))
    views.clear()
    for _ in range(2):  # before the first, the caches may have no buffers
        step(ours, batch)
    assert len(views) >= 8
    assert not any(view() is not None for view in views)


class Constant:
    """Adds the same numbers to each token's product, while it applies."""

    def __init__(self, numbers: np.ndarray[Any, Any]) -> None:
        self.applies = True
        self._numbers = numbers

    def __call__(self, x: np.ndarray[Any, Any], product: np.ndarray[Any, Any]) -> None:
        if self.applies:
            np.add(product, self._numbers, out=product)


@pytest.mark.parametrize("alone", [0, 1, 3])
def test_a_layer_that_another_addition_belongs_to_is_computed_alone(
    alone: int, chains: list[tuple[int, int]]
) -> None:
    """The layers before it are computed first, and those behind it afterwards."""
    ours, plain = models()
    added = mx.random.normal((ours.args.hidden_size,), key=mx.random.key(5))
    numbers = np.array(added)
    products = ours.layers[alone].mlp.down_proj.products
    products.addition = addition = Constant(numbers)
    original: Any = type(plain.layers[alone].mlp)

    class Added(original):
        def __call__(self, x: mx.array) -> mx.array:
            result: mx.array = original.__call__(self, x) + added
            return result

    plain.layers[alone].mlp.__class__ = Added
    chains.clear()
    assert_same(ours, plain, steps=1)
    assert chains == [each for each in ((0, alone - 1), (alone + 1, 3)) if each[0] <= each[1]]
    # A call to which it adds nothing computes all layers at once.
    addition.applies = False
    plain.layers[alone].mlp.__class__ = original
    chains.clear()
    assert_same(ours, plain, steps=1)
    assert chains == [(0, 3)]


def test_a_model_that_computes_between_its_layers_is_called_one_by_one(
    chains: list[tuple[int, int]],
) -> None:
    module, args = tiny_args("qwen3")
    args.head_dim, args.hidden_size = 64, args.num_attention_heads * 64
    ours, plain = built(module, args, False), built(module, args, False)

    class Scaled(module.Qwen3Model):  # type: ignore[misc,name-defined]
        def __call__(self, inputs: mx.array, cache: Any = None, _: Any = None) -> mx.array:
            h = self.embed_tokens(inputs)
            mask = cache[0].make_mask(h.shape[1])
            for each, own in zip(self.layers, cache, strict=True):
                h = each(h, mask, own) * 1.5
            normed: mx.array = self.norm(h)
            return normed

    for model in (ours, plain):
        model.model.__class__ = Scaled
    kernels.install(ours, exactly=False)
    decoder.install(ours)
    assert_same(ours, plain)
    assert chains == []


def test_a_call_that_fails_leaves_nothing_behind(chains: list[tuple[int, int]]) -> None:
    ours, plain = models()
    batch = filled_batch(ours, (3, 40, 1))
    last = ours.layers[-1]
    kind = type(last)

    class Broken(kind):  # type: ignore[misc,valid-type]
        def __call__(self, *arguments: Any, **more: Any) -> mx.array:
            raise ValueError("as asked")

    last.__class__ = Broken
    chains.clear()
    with pytest.raises(ValueError, match="as asked"):
        step(ours, batch)
    assert chains == []
    last.__class__ = kind
    assert_same(ours, plain)
