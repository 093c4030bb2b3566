"""The requests of the engine's benchmark, and the random models that it measures."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import tiny_config

from chairlift.loadtest.engine_bench.engines import BenchRequest, StepResult
from chairlift.loadtest.engine_bench.flags import engine_parser
from chairlift.loadtest.engine_bench.load import Load, Range, lengths
from chairlift.loadtest.engine_bench.measure import MixedLoad, decode_step, quantiles
from chairlift.loadtest.shapes import random_model


@given(low=st.integers(1, 5000), more=st.integers(0, 5000), seed=st.integers(0, 9))
def test_a_range_has_lengths_between_its_ends(low: int, more: int, seed: int) -> None:
    rng = random.Random(seed)
    for text in (f"{low}:{low + more}", *([str(low)] if not more else [])):
        drawn = [lengths(text).draw(rng) for _ in range(20)]
        assert low <= min(drawn)
        assert max(drawn) <= low + more


@given(
    median=st.floats(1, 1e6, allow_nan=False),
    sigma=st.floats(0, 3),
    longest=st.integers(1, 1 << 20),
    seed=st.integers(0, 9),
)
def test_log_normal_lengths_are_valid(median: float, sigma: float, longest: int, seed: int) -> None:
    distribution, rng = lengths(f"lognormal:{median}:{sigma}:{longest}"), random.Random(seed)
    assert all(1 <= distribution.draw(rng) <= longest for _ in range(20))


def test_log_normal_lengths_have_their_median() -> None:
    distribution, rng = lengths("lognormal:350:0.9:4096"), random.Random(1)
    drawn = sorted(distribution.draw(rng) for _ in range(4000))
    assert statistics.median(drawn) == pytest.approx(350, rel=0.1)
    assert drawn[int(0.84 * len(drawn))] == pytest.approx(350 * 2.46, rel=0.15)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "0:5", "7:5", "1:2:3", "-1", "1.5:2", "lognormal", "lognormal:0:1:9"),
        *("lognormal:9:nan:9", "lognormal:9:1", "lognormal:9:1:0", "lognormal:9:1:9:9"),
        "lognormal:inf:1:9",
    ],
)
def test_wrong_lengths_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="LOW:HIGH nor lognormal"):
        lengths(text)


def test_requests_arrive_at_the_rate_and_are_the_same_for_a_seed() -> None:
    load = Load(3000, Range(1, 3), Range(2, 4), rate=20.0, seed=3)
    arrivals = list(load.draw(50))
    assert arrivals == list(load.draw(50))
    times = [arrival.at for arrival in arrivals]
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.15)
    assert {a.at for a in Load(5, Range(1, 1), Range(1, 1)).draw(50)} == {0.0}
    assert all(0 <= token < 50 for arrival in arrivals for token in arrival.request.prompt)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_random_quantized_weights_are_as_large_as_others(kind: str, bits: int) -> None:
    config = tiny_config(kind, vocab_size=256)  # type: ignore[arg-type]
    plain, quantized = (random_model(config, mx.float32, each) for each in (None, bits))
    layer, other = (model.model.layers[1].self_attn.q_proj for model in (plain, quantized))
    weight = mx.dequantize(other.weight, other.scales, other.biases, 64, bits)
    assert weight.shape == layer.weight.shape
    assert weight.std().item() == pytest.approx(layer.weight.std().item(), rel=0.5)
    assert abs(weight.mean().item()) < 0.1 * weight.std().item()
    logits = quantized(mx.array([[1, 2, 3]]))
    assert mx.isfinite(logits).all().item()


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 50)), min_size=1),
    st.floats(0.01, 1.0),
)
def test_a_weighted_quantile_is_that_of_repeated_numbers(
    weighted: list[tuple[float, int]], share: float
) -> None:
    weighted.append((7.0, 1))
    numbers, weights = zip(*weighted, strict=True)
    repeated = sorted(number for number, weight in weighted for _ in range(weight))
    (found,) = quantiles(numbers, weights, [share])
    place = repeated.index(found)
    assert place <= share * len(repeated)
    last = place + repeated.count(found)
    assert last >= share * len(repeated) * (1 - 1e-9)


def test_itl_counts_a_gap_once_for_each_row() -> None:
    load = MixedLoad(tokens=1, seconds=1.0, gaps=[5.0, 5.0, 5.0, 20.0], gap_rows=[1, 1, 1, 100])
    load.reserved_bytes = 1
    figures = load.figures(1)
    assert (figures["gap_p50_ms"], figures["itl_p50_ms"]) == (5.0, 20.0)


def test_outputs_of_one_token_have_no_gaps() -> None:
    figures = MixedLoad(tokens=4, seconds=2.0).figures(1)
    assert figures["output_tokens_per_s"] == 2.0
    assert not [name for name in figures if "gap" in name or "itl" in name]


@pytest.mark.parametrize(
    "flags",
    [
        *("--rows 0", "--decode 1 0", "--context 0", "--timeline 0", "--requests -1"),
        *("--adapters -1", "--max-concurrency 0", "--tensor-parallel-size 0"),
        *("--kv-gb nan", "--kv-gb 0", "--bandwidth 0", "--flops inf", "--rate -1"),
    ],
)
def test_numbers_that_cannot_be_measured_are_refused(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        engine_parser("", ["tiny"], ["float32"]).parse_args(flags.split())
    assert f"argument {flags.split()[0]}: " in capsys.readouterr().err


class _SmallEngine:
    """An engine with room for one row at a time."""

    reserved = used = 0

    def __init__(self) -> None:
        self.left = 0

    def add(self, requests: list[BenchRequest]) -> None:
        self.left = len(requests)

    def step(self) -> StepResult:
        if not self.left:
            return StepResult(0, 0, 0)
        self.left -= 1
        return StepResult(1, 1, 1)


def test_rows_that_never_decode_together_end_the_measurement() -> None:
    with pytest.raises(ValueError, match="3 rows never decode together"):
        decode_step(_SmallEngine(), 3, 5, 50, timeline=False)
