"""The CUDA kernel that chooses tokens, emulated on the CPU, chooses as MLX's operations do."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from emulator.kernels import COMPILER, emulated

from chairlift.engine.cuda import sampling
from chairlift.engine.cuda.sampling import DTYPES
from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.choice import TokenChoice
from chairlift.engine.sampling.outcomes import NO_CHOICE, NONFINITE

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ on Linux")

ROWS = 6
TEMPERATURES = (0.0, 1e-40, 1e-5, 0.6, 1.0, 2.0, 1e30)
TOP_PS = (1.0, 0.9999999, 0.95, 0.5, 1e-45, 0.0)


def _params(rng: np.random.Generator, vocabulary: int) -> list[SamplingParams]:
    top_ks = (0, 1, 3, 20, vocabulary, 2**31 - 1)
    return [
        SamplingParams(
            *(1, int(rng.integers(2**31))),
            temperature=float(rng.choice(TEMPERATURES)),
            top_k=int(rng.choice(top_ks)),
            top_p=float(rng.choice(TOP_PS)),
            min_p=float(rng.choice((0.0, 0.01, 0.3, 1.0))),
        )
        for _ in range(ROWS)
    ]


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 64, 1003, 4096, 20000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_random_parameters(dtype: mx.Dtype, vocabulary: int) -> None:
    rng = np.random.default_rng([vocabulary, dtype.size])
    equal = 0
    trials = 8
    for trial in range(trials):
        scale = rng.choice((0.0, 0.01, 1.0, 4.0, 30.0))
        raw = mx.array(rng.normal(0, scale, (ROWS, vocabulary)), mx.float32).astype(dtype)
        masked = bool(rng.integers(2))
        logits = raw
        if masked:
            allowed = rng.random((ROWS, vocabulary)) < rng.choice((0.0, 0.1, 0.9))
            logits = mx.where(mx.array(allowed), raw.astype(mx.float32), -mx.inf)
        choice = TokenChoice(_params(rng, vocabulary))
        call = logits, raw, [trial] * ROWS, masked
        with emulated(sampling, backwards=bool(trial % 2)):
            actual = choice.by_kernel(*call)
        equal += int((actual == choice.by_operations(*call)).sum())
    # Rounding decides between two tokens once in thousands of draws.
    assert equal >= trials * ROWS - 1


def test_lines_without_rows_are_ignored_and_rows_do_not_depend_on_others() -> None:
    rng = np.random.default_rng(3)
    raw = mx.array(rng.normal(0, 3, (ROWS + 2, 300)), mx.float32)
    params = _params(rng, 300)
    with emulated(sampling, backwards=False):
        together = TokenChoice(params).by_kernel(raw, raw, [4] * ROWS, False)
        for row in range(ROWS):
            own = raw[row : row + 1]
            alone = TokenChoice(params[row : row + 1])
            assert alone.by_kernel(own, own, [4], False).item() == together[row].item()


def test_failure_codes() -> None:
    """NaN, +inf, only -inf, a mask that leaves nothing, and one finite logit."""
    inf, nan = float("inf"), float("nan")
    raw = mx.array([[0, nan, 1], [0, inf, 1], [-inf] * 3, [0, 1, 2], [-inf, 0, -inf]])
    allowed = mx.array([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1]], mx.bool_)
    choice = TokenChoice([SamplingParams(1, 0, temperature=t) for t in (0, 1, 0, 1, 1)])
    call = mx.where(allowed, raw, -inf), raw, [0] * 5, True
    with emulated(sampling, backwards=True):
        assert choice.by_kernel(*call).tolist() == [NONFINITE] * 3 + [NO_CHOICE, 1]
    assert choice.by_operations(*call).tolist() == [NONFINITE] * 3 + [NO_CHOICE, 1]
