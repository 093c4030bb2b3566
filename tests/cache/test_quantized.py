"""KV in 8 and 4 bits: values equal MLX's, rows keep their bits, and perplexity hardly changes."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from support.models import default_model_path
from support.tiny import tiny_model

from chairlift.cache.batch import BatchCache
from chairlift.cache.kinds import make_batch
from chairlift.cache.quantized import HalfPrecision, Quantization
from chairlift.cache.snapshot import KVPiece, LayerKind
from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.loader import load_model
from chairlift.engine.model.text.tokenizer import load_tokenizer
from chairlift.engine.model.trials.probe import probe

TEXT = (
    "A chairlift never stops: riders board and leave a moving line. The server does the same with "
    "sequences. Each step runs one batch; whoever is done makes room, and whoever waits takes the "
    "free seat. Nobody waits for the others to finish, and the mountain looks the same from every "
    "chair. In winter the snow is deep, and the first run of the day is the best of all. "
)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(8, 64), (8, 32), (4, 32), (4, 128)])
def test_packed_values_equal_mlx_s(bits: int, group: int, dtype: mx.Dtype) -> None:
    values = mx.random.normal((2, 3, 5, 128)).astype(dtype)
    quantization = Quantization(bits, group)
    packed = quantization.pack(values)
    parts = mx.quantize(values, group_size=group, bits=bits)
    theirs = mx.dequantize(*parts, group_size=group, bits=bits)
    assert packed.dtype == mx.uint32
    assert packed.nbytes == sum(part.nbytes for part in parts)
    assert mx.array_equal(quantization.unpack(packed, 128, dtype), theirs)


def test_rows_that_move_keep_their_bits() -> None:
    def batch() -> BatchCache:
        return BatchCache([LayerKind(), LayerKind(8)], Quantization(4, 32))

    prompts, rows = batch(), batch()
    for length in (5, 12):
        prompts.reset()
        prompts.join(columns=length)
        with prompts.step(length):
            for layer in prompts.layers:
                layer.update_and_fetch(*mx.random.normal((2, 1, 2, length, 64)))
        state = prompts.extract(0).copy()
        row = rows.join(state)
        for before, after in zip(state.layers, rows.extract(row).layers, strict=True):
            assert isinstance(before, KVPiece)
            assert isinstance(after, KVPiece)
            assert np.array_equal(after.keys, before.newest(after.tokens).keys)
            assert np.array_equal(after.values, before.newest(after.tokens).values)
    moved = rows.extract(1).copy()
    mx.eval(moved.arrays)
    rows.leave({0})
    rows.check_integrity()
    for before, after in zip(moved.layers, rows.extract(0).layers, strict=True):
        assert isinstance(before, KVPiece)
        assert isinstance(after, KVPiece)
        assert np.array_equal(after.keys, before.keys)


def test_a_group_that_does_not_divide_the_head_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="group of 64 does not divide the head dimension 16"):
        probe(tiny_model("llama", seed=1), "llama", Quantization(8, 64))


@pytest.mark.system
def test_eight_bits_halve_memory_and_keep_perplexity() -> None:
    source = ModelSource("default", "gguf", default_model_path())
    loaded = load_model(source, "float32")
    tokens = load_tokenizer(source).encode(TEXT)
    plain = probe(loaded.model, "llama").geometry
    packed = probe(loaded.model, "llama", Quantization(8, 64)).geometry
    assert (
        packed.bytes_per_token <= 0.57 * plain.bytes_per_token / 2
    )  # halved: plain KV is in 32 bits here, and the bound is for 16
    exact = _perplexity(loaded.model, tokens, None)
    assert abs(_perplexity(loaded.model, tokens, Quantization(8, 64)) / exact - 1) < 0.01
    assert abs(_perplexity(loaded.model, tokens, Quantization(4, 32)) / exact - 1) > 1e-4


def test_layers_in_half_precision_keep_large_numbers_and_windows_their_type() -> None:
    kinds = [LayerKind(), LayerKind(window=8), LayerKind(window=8, chunked=True)]
    batch = BatchCache(kinds, HalfPrecision())
    batch.join()
    numbers = mx.array([1.0, -1e6, 1e6, 6e-6, float("nan")])
    new = mx.broadcast_to(numbers[:, None], (1, 1, 5, 4))
    with batch.step(5):
        full, *others = [layer.update_and_fetch(new, new) for layer in batch.layers]
    expected = np.array(numbers.astype(mx.float16))
    expected[1:3] = -65504, 65504
    for array in full:
        assert array.dtype == mx.float32
        assert np.array_equal(np.array(array)[0, 0, :, 0], expected, equal_nan=True)
    assert [layer.state[0].dtype for layer in batch.layers] == [mx.float16, *[mx.float32] * 2]
    for one in others:
        assert mx.array_equal(one[0], new, equal_nan=True)


def _perplexity(model: object, tokens: list[int], quantization: Quantization | None) -> float:
    batch = make_batch(model, quantization)
    batch.join(columns=len(tokens))
    losses = []
    for start in range(0, len(tokens) - 1, 32):
        chunk = tokens[start : start + 32]
        with batch.step(len(chunk)):
            logits = model(mx.array([chunk]), cache=batch.layers)  # type: ignore[operator]
        following = tokens[start + 1 : start + 1 + len(chunk)]
        scores = logits[0, : len(following)] - mx.logsumexp(
            logits[0, : len(following)], axis=-1, keepdims=True
        )
        losses.append(-scores[mx.arange(len(following)), mx.array(following)])
    return math.exp(mx.concatenate(losses).mean().item())
