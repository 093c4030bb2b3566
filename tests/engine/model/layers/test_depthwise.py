"""Depthwise convolutions as sums of products give MLX's results."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from conformance.configs import reason_not_applicable
from conformance.weights import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import mamba2
from support.engine.reference import logits_of_prompt

from chairlift.engine.model.layers import depthwise
from chairlift.engine.model.layers.depthwise import MAX_TAPS, DepthwiseConv1d

# The model files of mlx-lm with such layers. Some files cannot be imported, so they are read.
FILES = sorted(
    file.stem
    for file in Path(mamba2.__file__).parent.glob("*.py")
    if "nn.Conv1d(" in file.read_text() and not reason_not_applicable(file.stem)
)


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(2, 9),
    st.sampled_from([1, 3, 4, MAX_TAPS]),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
)
def test_any_convolution(
    rows: int, length: int, channels: int, taps: int, padding: int, bias: bool, dtype: mx.Dtype
) -> None:
    """Also where the input is as short as the kernel."""
    plain = nn.Conv1d(channels, channels, taps, padding=padding, groups=channels, bias=bias)
    if bias:
        plain.bias = mx.random.normal(plain.bias.shape)
    x = mx.random.normal((rows, length + taps - 1, channels)).astype(dtype)
    plain.set_dtype(dtype)
    weight, added = plain.weight.astype(mx.float32), plain.bias if bias else 0
    expected = mx.conv1d(x.astype(mx.float32), weight, padding=padding, groups=channels) + added
    assert depthwise.install(plain) == 1
    actual = plain(x)
    assert actual.dtype == dtype
    assert actual.shape == (rows, length + 2 * padding, channels)
    tolerance = 1e-5 if dtype == mx.float32 else 0.02
    assert mx.allclose(actual, expected, rtol=tolerance, atol=tolerance).item()


def test_other_convolutions_stay() -> None:
    layers = [
        nn.Conv1d(4, 4, 3),
        nn.Conv1d(4, 4, 3, groups=2),
        nn.Conv1d(4, 8, 3, groups=4),
        nn.Conv1d(4, 4, 3, groups=4, stride=2),
        nn.Conv1d(4, 4, 3, groups=4, dilation=2),
        nn.Conv1d(4, 4, MAX_TAPS + 1, groups=4),
    ]
    assert depthwise.install(nn.Sequential(*layers)) == 0
    assert {type(layer) for layer in layers} == {nn.Conv1d}


def test_parameters_stay_the_same() -> None:
    layer = nn.Conv1d(4, 4, 3, groups=4)
    before = [name for name, _ in tree_flatten(layer.parameters())]
    assert depthwise.install(layer) == 1
    assert [name for name, _ in tree_flatten(layer.parameters())] == before
    assert depthwise.install(layer) == 0


def test_there_are_such_files() -> None:
    assert {"lfm2", "mamba2", "qwen3_next", "falcon_h1"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_models_logits_stay_the_same(name: str) -> None:
    model = tiny_model(name)
    expected = logits_of_prompt(model, 30, 1)
    assert depthwise.install(model) > 0
    assert any(type(layer) is DepthwiseConv1d for layer in model.modules())
    assert (
        mx.abs(logits_of_prompt(model, 30, 1) - expected).max().item()
        <= 1e-4 * mx.abs(expected).max().item()
    )
