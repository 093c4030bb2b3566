"""The gated delta rule on CUDA: the kernel itself, emulated on the CPU."""

from __future__ import annotations

import mlx.core as mx
import pytest
from conformance.weights import tiny_model
from emulator.kernels import COMPILER, emulated
from mlx_lm.models.cache import make_prompt_cache

from chairlift.engine.cuda import gated_delta
from chairlift.engine.model.layers import install as layers
from chairlift.engine.model.layers.decayed import decayed_attention
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


def test_shapes_that_do_not_agree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would read behind an array's end; MLX broadcasts, or says what is wrong."""
    for name in ("kernel_works", "decayed_works"):
        monkeypatch.setattr(gated_delta, name, lambda *form: True)
    for name in ("gated_delta", "decayed"):
        monkeypatch.setattr(gated_delta, name, lambda *arrays: arrays)
    arguments = _arguments(2, 3, 2, 4, 32, 16, False, mx.float32)
    decaying = [n for n in range(6) if n != 4]  # all but beta
    assert gated_delta.by_kernel(*arguments, mx.ones((2, 3), mx.bool_)) is not None
    assert gated_delta.decayed_by_kernel(*(arguments[n] for n in decaying)) is not None
    assert gated_delta.by_kernel(*arguments, mx.ones((2, 1), mx.bool_)) is None
    for changed, array in enumerate(arguments):
        for axis in range(array.ndim):
            other = list(arguments)
            other[changed] = array[tuple([slice(None)] * axis + [slice(1)])]
            assert gated_delta.by_kernel(*other, None) is None, (changed, axis)
            if changed in decaying:
                assert gated_delta.decayed_by_kernel(*(other[n] for n in decaying)) is None
    nothing = [array[:, :0] for array in arguments[:-1]]
    assert gated_delta.by_kernel(*nothing, arguments[-1], None) is None


def test_without_a_gpu_the_kernel_is_not_used() -> None:
    if mx.default_device() == mx.Device(mx.gpu):
        pytest.skip("needs a machine without a GPU")
    arguments = _arguments(1, 2, 1, 1, 32, 16, False, mx.float32)
    assert gated_delta.by_kernel(*arguments, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("state_type", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"),
    [(32, 16, mx.float32), (128, 40, mx.bfloat16), (256, 20, mx.float16), (64, 9, mx.float32)],
)
def test_states_that_decay(
    tokens: int, state_type: mx.Dtype, dim: int, value_dim: int, dtype: mx.Dtype
) -> None:
    """Also without any decay, and with tokens that leave nothing of the state."""
    q, k, v, g, _, state = _arguments(2, tokens, 2, 4, dim, value_dim, False, dtype)
    v = v.astype(mx.float32)
    g = mx.where(mx.arange(tokens)[:, None] % 3 == 1, mx.array([1.0, 1e-8, 0.5, 1.0]), g)
    state = state.astype(state_type)
    expected, expected_state = decayed_attention(q, k, v, mx.log(g), state.swapaxes(2, 3))
    for backwards in (False, True):
        with emulated(gated_delta, backwards):
            output, after = gated_delta.decayed(q, k, v, g, state)
            mx.eval(output, after)
        assert output.dtype == after.dtype == mx.float32
        assert mx.allclose(output, expected, rtol=1e-3, atol=1e-3).item()
        assert mx.allclose(after, expected_state.swapaxes(2, 3), rtol=1e-3, atol=1e-3).item()


def test_states_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "decayed_works", lambda *form: True)
    monkeypatch.setattr(gated_delta, "decayed", lambda *arrays: arrays)
    for dim, dtype, fits in (
        (128, mx.bfloat16, True),
        (256, mx.float32, True),
        (288, mx.bfloat16, False),
        (16, mx.bfloat16, False),
    ):
        q, k, v, g, _, state = _arguments(1, 2, 1, 1, dim, 16, False, dtype)
        assert (gated_delta.decayed_by_kernel(q, k, v, g, state) is not None) == fits
        other = q.astype(mx.float16)
        assert gated_delta.decayed_by_kernel(other, k, v, g, state) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "bailing_moe_linear"])
def test_layers_of_models_use_the_kernel(name: str) -> None:
    """Their logits are those of blocks, and of one token after the other."""
    model = tiny_model(name)
    calls: list[int] = []

    def kernel(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        calls.append(q.shape[1])
        y, after = decayed_attention(q, k, v, mx.log(g), state.swapaxes(2, 3))
        return y, after.swapaxes(2, 3)

    results = []
    for own in (None, kernel):
        layers.install(model, layers.Kernels(decayed=own))
        cache = make_prompt_cache(model)
        results.append(
            [model(mx.array([tokens]), cache=cache) for tokens in ([1, 5, 2], [7], [3] * 9)]
        )
        mx.eval(results)
    layers.install(model)
    assert {1, 9} <= set(calls)
    for one, other in zip(*results, strict=True):
        assert mx.allclose(one, other, rtol=1e-3, atol=1e-3)
