"""GGUF files give mlx-lm's model with the same weights; broken files are one-line errors."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GGMLType
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.rope_utils import initialize_rope
from support.models import default_model_path, write_tiny_gguf
from support.tiny import TinyKind, tiny_config, tiny_model

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.gguf.affine import pack_affine, packed_bits
from chairlift.engine.hub.gguf.file import GGUFFile
from chairlift.engine.hub.gguf.model import build_model, own_dtype

KINDS: list[TinyKind] = ["llama", "qwen2", "qwen3", "gemma3"]
PACKABLE = [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0]
# Longer than gemma3's window of 16, so that a wrong layer pattern changes the logits.
PROMPT = mx.array([[(37 * i + 11) % 259 for i in range(40)]])


def _build(path: Path, keep_quantized: bool = False) -> Any:
    model, _ = build_model(
        GGUFFile(path),
        keep_quantized=keep_quantized,
        dtype=mx.float32,
        on_progress=lambda _: None,
    )
    return model


def _assert_same_logits(model: Any, reference: Any, tolerance: float = 1e-4) -> None:
    difference = mx.abs(model(PROMPT) - reference(PROMPT)).max().item()
    assert difference < tolerance, f"logits differ by {difference}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_files_logits_equal_mlx_lms(tmp_path: Path, kind: TinyKind, tied: bool) -> None:
    path = tmp_path / "m.gguf"
    reference = write_tiny_gguf(path, kind, tiny_model(kind, tied=tied))
    _assert_same_logits(_build(path), reference)


@pytest.mark.parametrize("type_", [*PACKABLE, GGMLType.Q5_0, GGMLType.F16, GGMLType.BF16])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_quantized_files_give_the_same_logits_quantized_and_dequantized(
    tmp_path: Path, kind: TinyKind, type_: GGMLType
) -> None:
    path = tmp_path / "m.gguf"
    reference = write_tiny_gguf(path, kind, tiny_model(kind, tied=False), type_)
    _assert_same_logits(_build(path), reference)
    kept = _build(path, keep_quantized=True)
    _assert_same_logits(kept, reference, tolerance=2e-3)
    packed = [name for name, a in tree_flatten(kept.parameters()) if a.dtype == mx.uint32]
    matrices = [name for name, a in tree_flatten(reference.parameters()) if a.ndim == 2]
    assert sorted(packed) == (sorted(matrices) if type_ in PACKABLE else [])


@pytest.mark.parametrize("type_", PACKABLE)
def test_packing_is_exact(type_: GGMLType) -> None:
    values = np.random.default_rng(0).normal(size=(24, 96)).astype(np.float32)
    values[0, :32] = 0
    values[1] *= 5000  # Q8_0's bias then exceeds float16
    blocks = gguf.quantize(values, type_)
    packed, scales, biases = pack_affine(blocks, type_)
    bits = 8 if type_ == GGMLType.Q8_0 else 4
    dequantized = np.array(mx.dequantize(packed, scales, biases, group_size=32, bits=bits))
    expected = gguf.dequantize(blocks, type_)
    np.testing.assert_allclose(dequantized, expected, rtol=1e-6, atol=1e-6)
    assert np.array(scales.astype(mx.float16).astype(mx.float32)).tolist() == scales.tolist()


@pytest.mark.parametrize(("type_", "size"), [(GGMLType.Q4_K, 144), (GGMLType.Q5_K, 176)])
def test_packing_of_k_quants_is_exact_in_float32(type_: GGMLType, size: int) -> None:
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (24, 3, size)).astype(np.uint8)
    numbers = (rng.normal(size=(24, 3, 2)) * 0.01).astype(np.float16)
    blocks[..., :4] = numbers.view(np.uint8)
    blocks = blocks.reshape(24, -1)
    bits = packed_bits(type_, mx.float32)
    assert bits is not None
    assert packed_bits(type_, mx.float16) is None
    packed, scales, biases = pack_affine(blocks, type_)
    dequantized = np.array(mx.dequantize(packed, scales, biases, group_size=32, bits=bits))
    expected = gguf.dequantize(blocks, type_)
    np.testing.assert_allclose(dequantized, expected, rtol=1e-6, atol=1e-6)


def test_llama3_frequency_factors_become_a_rope_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = 500_000.0
    config = tiny_config("llama") | {"rope_scaling": scaling, "rope_theta": theta}
    weights = tiny_model("llama")
    reference = llama.Model(llama.ModelArgs.from_dict(config))
    reference.load_weights(tree_flatten(weights.parameters()))
    plain = theta ** (np.arange(0, 16, 2) / 16)
    factors = (np.array(reference.layers[0].self_attn.rope._freqs) / plain).astype(np.float32)
    assert factors.min() == pytest.approx(1)
    assert factors.max() == pytest.approx(8)
    path = tmp_path / "m.gguf"
    base = {"llama.rope.freq_base": theta}
    write_tiny_gguf(path, "llama", weights, metadata=base, tensors={"rope_freqs.weight": factors})
    _assert_same_logits(_build(path), reference)
    factors[3] *= 1.5
    write_tiny_gguf(path, "llama", weights, metadata=base, tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModel, match="not Llama 3's scaling"):
        _build(path)


def test_linear_scaling_applies_to_gemma3s_global_layers_only(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    write_tiny_gguf(path, "gemma3", tiny_model("gemma3"), metadata=scaling)
    scales = [layer.self_attn.rope.scale for layer in _build(path).layers]
    assert scales == [1, 1 / 8, 1]


def test_yarns_ramp_is_the_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    names = {"type": "yarn", "factor": 4.0, "original_context_length": 1024}
    for ramp in ({}, {"yarn_beta_fast": 8.0, "yarn_beta_slow": 4.0}):
        metadata = {f"llama.rope.scaling.{key}": value for key, value in (names | ramp).items()}
        write_tiny_gguf(path, "llama", tiny_model("llama"), metadata=metadata)
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        }
        scaling |= {key.removeprefix("yarn_"): value for key, value in ramp.items()}
        config = tiny_config("llama")
        expected = initialize_rope(config["head_dim"], config["rope_theta"], False, scaling)
        found = _build(path).layers[0].self_attn.rope
        assert mx.allclose(found._freqs, expected._freqs).item()


def test_the_window_pattern_may_be_a_list(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = "gemma3.attention.sliding_window_pattern"
    pattern = {key: [True, False] * 3}
    reference = write_tiny_gguf(path, "gemma3", tiny_model("gemma3"), metadata=pattern)
    _assert_same_logits(_build(path), reference)
    irregular = {key: [True, False, True, True, False, True]}
    write_tiny_gguf(path, "gemma3", tiny_model("gemma3"), metadata=irregular)
    with pytest.raises(UnsupportedModel, match="not a regular pattern"):
        _build(path)


@pytest.mark.parametrize(
    ("metadata", "error", "line"),
    [
        ({"general.architecture": "mamba"}, UnsupportedModel, "architecture 'mamba' is not"),
        ({"llama.expert_count": 8}, UnsupportedModel, "mixture-of-experts"),
        ({"llama.block_count": None}, ModelError, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, ModelError, "llama.block_count is not of type int"),
        ({"llama.block_count": 2**31}, ModelError, "damaged, llama.block_count is 2147483648"),
        ({"llama.block_count": 3}, ModelError, "do not match the metadata: Missing"),
        ({"llama.attention.head_count": 8}, ModelError, "do not match the metadata"),
        ({"llama.attention.head_count": [4, 2]}, UnsupportedModel, "differs from layer to layer"),
        ({"llama.rope.dimension_count": 8}, UnsupportedModel, "rope.dimension_count 8 differs"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModel, "RoPE scaling 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 0.5}, UnsupportedModel, "attn_factor 0.5 is not"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, UnsupportedModel, "ext_factor 0.5 is not"),
        ({"split.count": 3, "split.no": 0}, UnsupportedModel, "one of the 3 parts of a model"),
    ],
)
def test_bad_metadata_is_a_one_line_error(
    tmp_path: Path, metadata: dict[str, Any], error: type[ModelError], line: str
) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"), metadata=metadata)
    with pytest.raises(error, match=line) as caught:
        _build(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    extra = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    write_tiny_gguf(path, "qwen3", tiny_model("qwen3"), tensors=extra)
    with pytest.raises(ModelError, match=r"do not match the metadata: Received 1 .*q_proj\.bias"):
        _build(path)
    write_tiny_gguf(path, "llama", tiny_model("llama"), tensors={"blk.0.ssm": extra.popitem()[1]})
    with pytest.raises(UnsupportedModel, match=r"tensor blk\.0\.ssm has no place"):
        _build(path)


def test_a_truncated_file_is_detected_at_any_length(tmp_path: Path) -> None:
    complete = tmp_path / "complete.gguf"
    write_tiny_gguf(complete, "llama", tiny_model("llama"))
    data = complete.read_bytes()
    truncated = tmp_path / "cut.gguf"
    for size in [0, 3, 6, 20, *range(30, len(data), len(data) // 60), len(data) - 1]:
        truncated.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"truncated|empty") as caught:
            GGUFFile(truncated)
        assert str(truncated) in str(caught.value)


def test_a_damaged_header_raises_only_model_errors(tmp_path: Path) -> None:
    intact = tmp_path / "intact.gguf"
    write_tiny_gguf(intact, "llama", tiny_model("llama"))
    data = intact.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(200):
        copy = bytearray(data)
        for at in rng.integers(4, 4000, size=3):
            copy[at] = rng.integers(256)
        damaged.write_bytes(copy)
        try:
            GGUFFile(damaged)
        except ModelError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("head", "error", "line"),
    [
        (b"GGML" + bytes(40), ModelError, "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid", ModelError, "git lfs pull"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), UnsupportedModel, "version 1 is not"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), UnsupportedModel, "big-endian"),
    ],
)
def test_files_of_other_formats(
    tmp_path: Path, head: bytes, error: type[ModelError], line: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(head)
    with pytest.raises(error, match=line):
        GGUFFile(path)


def test_unknown_tensor_types_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"))
    data = path.read_bytes()
    name = b"token_embd.weight"
    type_at = data.index(name) + len(name) + 4 + 2 * 8
    path.write_bytes(data[:type_at] + struct.pack("<I", 999) + data[type_at + 4 :])
    with pytest.raises(UnsupportedModel, match=r"tensor token_embd.weight has type 999"):
        GGUFFile(path)


@pytest.mark.system
def test_the_default_models_header_equals_that_of_the_gguf_package() -> None:
    path = default_model_path()
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.start, mine.n_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))


@pytest.mark.parametrize(
    ("kind", "type_", "expected"),
    [
        ("llama", GGMLType.Q8_0, mx.float16),
        ("llama", GGMLType.BF16, mx.bfloat16),
        ("llama", GGMLType.F32, mx.float32),
        ("gemma3", GGMLType.Q8_0, mx.bfloat16),
    ],
)
def test_own_dtype(tmp_path: Path, kind: TinyKind, type_: GGMLType, expected: mx.Dtype) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, kind, tiny_model(kind), type_)
    assert own_dtype(GGUFFile(path)) == expected
