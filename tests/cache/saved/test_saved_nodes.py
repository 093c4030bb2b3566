"""Snapshots in files: round trips, and what identifies a node."""

from __future__ import annotations

import io
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from support.cache.saved import (
    DTYPES,
    KINDS,
    MODEL,
    TOKENS,
    assert_same_snapshot,
    kv_piece,
    live_snapshot,
    saved_node,
    write_file,
    zero_kv,
)

from chairlift.cache.batch import BatchCache
from chairlift.cache.path_digest import prefix_digests, salt_digest
from chairlift.cache.saved.layers import (
    KNOWN,
    ArraySpec,
    LayerTemplate,
    SavedLayer,
    Template,
    canonical,
    pack,
    template_of,
)
from chairlift.cache.saved.nodes import (
    fingerprint,
    make_node,
    read_head,
    read_node,
    weights_sample,
    write_node,
)
from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 3])
def test_round_trip(tmp_path: Path, dtype: mx.Dtype, start: int) -> None:
    live = live_snapshot(start, dtype)
    path = write_file(tmp_path / "a", saved_node(live))
    node = read_node(path, MODEL, template_of(KINDS, live))
    assert_same_snapshot(node.snapshot(), live)
    for head in (node.head, read_head(path)):
        assert head.tokens.tolist() == list(TOKENS[start:])
        assert (head.start, head.stop, head.salt) == (start, 12, salt_digest("tenant"))
        assert [head.prefix] == prefix_digests(head.salt, np.array(TOKENS, np.int32), [start])
        assert not head.cuttable
    assert b"tenant" not in path.read_bytes()
    assert mx.load(str(path), format="safetensors")  # mlx reads it as a plain safetensors file, too


def test_parts_that_share_memory_and_empty_layers(tmp_path: Path) -> None:
    live = live_snapshot(0, mx.bfloat16).part(2, 11)
    node = make_node(MODEL, "", TOKENS[:11], 2, pack(KINDS, live))
    assert live.layers[2] is None
    assert_same_snapshot(read_node(write_file(tmp_path / "a", node), MODEL).snapshot(), live)
    live = Snapshot(0, 12, (kv_piece(12), None, None))
    assert_same_snapshot(
        read_node(write_file(tmp_path / "b", saved_node(live)), MODEL).snapshot(), live
    )


def test_nan_payloads_and_denormals_keep_their_bits(tmp_path: Path) -> None:
    bits = mx.array([[[[0x7FC1, 0xFF80, 0x0001, 0x8000]]]], mx.uint16).view(mx.bfloat16)
    live = Snapshot(0, 1, (KVPiece(bits, bits),))
    node = make_node(MODEL, "", [7], 0, pack(KINDS[:1], live))
    assert_same_snapshot(read_node(write_file(tmp_path / "a", node), MODEL).snapshot(), live)


def test_keys_without_values(tmp_path: Path) -> None:
    live = Snapshot(0, 12, (KVPiece(mx.ones((1, 1, 12, 4)), mx.zeros((1, 1, 12, 0))), None, None))
    assert_same_snapshot(
        read_node(write_file(tmp_path / "a", saved_node(live)), MODEL).snapshot(), live
    )


def test_a_layer_that_the_model_never_writes_to(tmp_path: Path) -> None:
    """Nemotron-NAS replaces the attention of some layers, which have caches all the same."""
    batch = BatchCache([LayerKind(), LayerKind()])
    batch.join()
    with batch.step(12):
        piece = kv_piece(12)
        batch.attention[0].update_and_fetch(piece.keys, piece.values)
    live = batch.extract(0)
    node = make_node(MODEL, "", TOKENS, 0, pack(batch.kinds, live))
    template = template_of(batch.kinds, live)
    read = read_node(write_file(tmp_path / "a", node), MODEL, template).snapshot()
    assert_same_snapshot(read, live)
    batch.join(read)
    assert_same_snapshot(batch.extract(1), live)


def test_nodes_without_windows_and_states_are_cuttable(tmp_path: Path) -> None:
    live = Snapshot(0, 12, (kv_piece(12), kv_piece(12)))
    node = make_node(MODEL, "", TOKENS, 0, pack(KINDS[:2], live))
    assert node.head.cuttable
    assert read_head(write_file(tmp_path / "a", node)).cuttable


def test_unsupported_data_types_are_refused() -> None:
    piece = KVPiece(mx.zeros((1, 1, 1, 1), mx.int8), mx.zeros((1, 1, 1, 1), mx.int8))
    with pytest.raises(SavedStateError, match="int8"):
        pack(KINDS[:1], Snapshot(0, 1, (piece,)))


def test_a_template_without_arrays_accepts_any_layer(tmp_path: Path) -> None:
    live = live_snapshot()
    path = write_file(tmp_path / "a", saved_node(live))
    template: Template = [LayerTemplate(kind) for kind in KINDS]
    assert_same_snapshot(read_node(path, MODEL, template).snapshot(), live)
    assert template_of(KINDS, live)[0].arrays == (
        ArraySpec("F32", (1, 2, None, 4)),
        ArraySpec("F32", (1, 2, None, 6)),
    )


def test_fingerprints_differ_in_every_part(tmp_path: Path) -> None:
    parts: list[str | int | None] = ["llama", "{}", "bfloat16", 4, 64]
    assert fingerprint(*parts) == fingerprint(*parts)
    others = [[*parts[:i], "other", *parts[i + 1 :]] for i in range(len(parts))]
    assert len({fingerprint(*p) for p in (*others, parts, ["llama{}", *parts[2:]])}) == 7
    weights = tmp_path / "w"
    weights.write_bytes(bytes(100_000))
    before = weights_sample({weights: []}, blocks=4, block=16)
    for place in (0, 99_999, 33_330):
        weights.write_bytes(bytes(place) + b"x" + bytes(99_999 - place))
        assert weights_sample({weights: []}, blocks=4, block=16) != before
    weights.write_bytes(b"")
    assert weights_sample({weights: []}) != before


def test_prefix_digests_do_not_depend_on_where_nodes_are_split() -> None:
    ids = np.arange(50, dtype=np.int32)
    salt = salt_digest("a")
    assert prefix_digests(salt, ids, [0, 20, 50])[1:] == [
        prefix_digests(salt, ids[:20], [20])[0],
        prefix_digests(salt, ids, [50])[0],
    ]
    assert prefix_digests(salt, ids, [50]) != prefix_digests(salt_digest("b"), ids, [50])
    assert prefix_digests(salt, ids, [50]) != prefix_digests(salt, ids[::-1], [50])


def test_names_and_aliases() -> None:
    for alias, name in {
        **{"ConcatenateKVCache": "KVCache", "KVCacheSimple": "KVCache"},
        **{"StandardKvCache": "KVCache", "RotatingKvCache": "RotatingKVCache"},
        "MambaCache": "ArraysCache",
    }.items():
        assert canonical(alias) == name
    with pytest.raises(SavedStateError, match="StandardQuantizedKvCache is not supported yet"):
        canonical("StandardQuantizedKvCache")
    with pytest.raises(SavedStateError) as caught:
        canonical("MyCache")
    assert all(name in str(caught.value) for name in KNOWN)


def test_write_needs_no_mlx_arrays() -> None:
    layer = SavedLayer("KVCache", (), zero_kv(1, 2, 12, dtype="BF16"))
    file = io.BytesIO()
    assert write_node(file, make_node(MODEL, "", TOKENS, 0, (layer,))) == len(file.getvalue())
