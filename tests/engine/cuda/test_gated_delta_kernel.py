"""The gated delta rule on CUDA: the kernel itself, emulated on the CPU."""

from __future__ import annotations

import mlx.core as mx
import pytest
from emulator.kernels import COMPILER, emulated

from chairlift.engine.cuda import gated_delta
from chairlift.engine.model.layers.gated_delta import gated_delta_blocks

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")


def _arguments(
    rows: int,
    tokens: int,
    key_heads: int,
    heads: int,
    dim: int,
    value_dim: int,
    vector: bool,
    dtype: mx.Dtype,
) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(tokens), 6)
    q, k = (
        mx.random.normal((rows, tokens, key_heads, dim), scale=dim**-0.5, key=key).astype(dtype)
        for key in keys[:2]
    )
    v = mx.random.normal((rows, tokens, heads, value_dim), key=keys[2]).astype(dtype)
    decays = (rows, tokens, heads, dim) if vector else (rows, tokens, heads)
    g = mx.random.uniform(0.2, 1.0, decays, key=keys[3])
    beta = mx.random.uniform(0.0, 2.0, (rows, tokens, heads), key=keys[4]).astype(dtype)
    return [q, k, v, g, beta, mx.random.normal((rows, heads, value_dim, dim), key=keys[5])]


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dim", "value_dim", "vector", "dtype"),
    [
        (32, 16, False, mx.float32),
        (128, 40, False, mx.bfloat16),
        (256, 20, False, mx.float16),
        (64, 9, True, mx.float32),
        (128, 16, True, mx.bfloat16),
    ],
)
@pytest.mark.parametrize("tokens", [1, 7])
def test_any_tokens(
    tokens: int,
    dim: int,
    value_dim: int,
    vector: bool,
    dtype: mx.Dtype,
    masked: bool,
    backwards: bool,
) -> None:
    """Heads that share keys, more lines than a block, lines that do not fill one, and masks."""
    arguments = _arguments(2, tokens, 2, 4, dim, value_dim, vector, dtype)
    mask = mx.array([[n % 3 != row for n in range(tokens)] for row in range(2)]) if masked else None
    with emulated(gated_delta, backwards):
        output, state = gated_delta.gated_delta(*arguments, mask)
        mx.eval(output, state)
    expected, expected_state = gated_delta_blocks(*arguments, mask)
    if mask is not None:
        expected = mx.where(mask[..., None, None], expected, 0)
    assert output.dtype == dtype
    tolerance = 1e-4 if dtype == mx.float32 else 0.02
    assert mx.allclose(output, expected, rtol=tolerance, atol=tolerance).item()
    assert mx.allclose(state, expected_state, rtol=1e-3, atol=1e-3).item()


def test_arrays_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "kernel_works", lambda *form: True)
    taken: list[int] = []
    monkeypatch.setattr(gated_delta, "gated_delta", lambda *arrays: taken.append(1) or arrays)
    for dim, vector, dtype, fits in (
        (128, False, mx.bfloat16, True),
        (128, True, mx.bfloat16, True),
        (256, False, mx.float32, True),
        (256, True, mx.float32, False),
        (512, False, mx.bfloat16, False),
        (48, False, mx.bfloat16, False),
    ):
        q, k, v, g, beta, state = _arguments(1, 2, 1, 1, dim, 16, vector, dtype)
        assert (gated_delta.by_kernel(q, k, v, g, beta, state, None) is not None) == fits
        wrong = q.astype(mx.float16 if dtype != mx.float16 else mx.float32)
        assert gated_delta.by_kernel(wrong, k, v, g, beta, state, None) is None
        small = state.astype(mx.bfloat16)
        assert gated_delta.by_kernel(q, k, v, g, beta, small, None) is None
    assert len(taken) == 3


def test_without_a_gpu_the_kernel_is_not_used() -> None:
    if mx.default_device() == mx.Device(mx.gpu):
        pytest.skip("needs a machine without a GPU")
    arguments = _arguments(1, 2, 1, 1, 32, 16, False, mx.float32)
    assert gated_delta.by_kernel(*arguments, None) is None
