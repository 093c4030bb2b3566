"""A model is divided by its own file: the parts are even, and add up to the whole."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.distributed import ShardedToAllLinear
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2, qwen3
from support.tiny import tiny_config, tiny_model

from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.parallel.heads import pad_heads
from chairlift.engine.parallel.shard import shard, shardable


class FakeGroup:
    """A group of which each rank is in this process. Its sums are left to the test."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = lambda: rank
        self.size = lambda: size


def test_the_architectures_that_can_be_divided() -> None:
    assert {"llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"} <= set(shardable())
    assert not {"gemma3_text", "lfm2", "base", "cache"} & set(shardable())


@pytest.mark.parametrize("kind", ["gemma3", "lfm2"])
def test_a_model_without_shard_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{kind}.* cannot be divided .* llama, "):
        shard(tiny_model(kind), FakeGroup(0, 2))


def test_uneven_parts_are_refused() -> None:
    # 128 columns of an MLP are no multiple of 3.
    with pytest.raises(UnsupportedModel, match="among 3 ranks"):
        shard(tiny_model("llama"), FakeGroup(0, 3))


def whole(kind: Any, heads: int, key_heads: int, width: int = 16) -> Any:
    """A random model with these heads; qwen2 has biases, qwen3 a norm for each head."""
    config = tiny_config(kind) | {
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": width,
    }
    module: Any = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}[kind]
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    key = mx.random.key(heads)
    weights = []
    for name, old in parameters:
        key, sub = mx.random.split(key)
        noise = mx.random.normal(old.shape, key=sub)
        weights.append(
            (name, 1 + 0.2 * noise if "norm" in name else noise * 1.5 / old.shape[-1] ** 0.5)
        )
    model.load_weights(weights)
    model.eval()
    return model


def together(models: list[Any], tokens: mx.array) -> mx.array:
    """The logits of all parts, with the sums that the ranks would exchange."""
    hidden = [model.model.embed_tokens(tokens) for model in models]
    for layers in zip(*(model.model.layers for model in models), strict=True):
        mixed = [
            layer.self_attn(layer.input_layernorm(x), "causal")
            for layer, x in zip(layers, hidden, strict=True)
        ]
        hidden = [x + sum(mixed) for x in hidden]
        mlps = [
            layer.mlp(layer.post_attention_layernorm(x))
            for layer, x in zip(layers, hidden, strict=True)
        ]
        hidden = [x + sum(mlps) for x in hidden]
    model = models[0]
    result: mx.array = model.model.embed_tokens.as_linear(model.model.norm(hidden[0]))
    return result


@pytest.fixture(autouse=True)
def _no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardedToAllLinear, "__call__", lambda self, x: x @ self["weight"].T)


@pytest.mark.parametrize(
    ("kind", "heads", "key_heads", "size"),
    [
        ("llama", 4, 2, 2),
        ("llama", 9, 3, 2),  # SmolLM2's heads: one of zeros is added to three
        ("llama", 4, 4, 8),
        ("llama", 2, 1, 4),
        ("qwen2", 4, 2, 2),
        ("qwen3", 6, 3, 2),
        ("qwen3", 10, 5, 4),
    ],
)
def test_the_parts_add_up_to_the_whole(kind: str, heads: int, key_heads: int, size: int) -> None:
    tokens = mx.array([[5, 6, 7, 8, 9]])
    model = whole(kind, heads, key_heads)
    expected = model(tokens)
    parts = [whole(kind, heads, key_heads) for _ in range(size)]
    for rank, part in enumerate(parts):
        shard(part, FakeGroup(rank, size))
    counts = [layer.self_attn.n_kv_heads for part in parts for layer in part.model.layers]
    assert set(counts) == {-(-key_heads // size)}
    got = together(parts, tokens)
    assert mx.abs(got - expected).max().item() < 1e-3 * mx.abs(expected).max().item()


def test_added_heads_of_quantized_layers_change_nothing() -> None:
    model, padded = whole("llama", 6, 3, 32), whole("llama", 6, 3, 32)
    for each in (model, padded):
        quantize(each, group_size=32, bits=4)
    layers = [layer.self_attn for layer in padded.model.layers]
    for layer in layers:
        pad_heads(layer, "n_heads", "n_kv_heads", 2)
    assert [(layer.n_heads, layer.n_kv_heads) for layer in layers] == [(8, 4)] * 2
    tokens = mx.array([[5, 6, 7, 8, 9]])
    assert mx.allclose(padded(tokens), model(tokens), atol=1e-4).item()
