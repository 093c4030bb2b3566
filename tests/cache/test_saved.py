"""Snapshots in files, and mlx-lm's prompt caches read: round trips, and all that can be wrong."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    save_prompt_cache,
)
from support.tiny import tiny_model

from chairlift.cache.kinds import layer_kinds, make_batch
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
    SavedNode,
    fingerprint,
    make_node,
    read_head,
    read_node,
    weights_sample,
    write_node,
)
from chairlift.cache.saved.promptfile import read_prompt_cache
from chairlift.cache.saved.safetensors import SavedStateError, Tensor
from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, StatePiece

KINDS = (LayerKind(), LayerKind(window=4), LayerKind(recurrent=True))
MODEL = fingerprint("llama", "{}", "float32", None)
TOKENS = tuple(range(1000, 1012))
DTYPES = (mx.float32, mx.float16, mx.bfloat16, mx.uint32)


def _values(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.uint32:
        return mx.random.randint(0, 1 << 30, shape).astype(mx.uint32)
    return mx.random.normal(shape).astype(dtype)


def _kv(tokens: int, dtype: mx.Dtype = mx.float32) -> KVPiece:
    return KVPiece(_values((1, 2, tokens, 4), dtype), _values((1, 2, tokens, 6), dtype))


def _live(start: int = 3, dtype: mx.Dtype = mx.float32) -> Snapshot:
    state = StatePiece((None, _values((1, 3, 5), dtype), _values((1, 2), mx.float32)))
    return Snapshot(start, len(TOKENS), (_kv(len(TOKENS) - start, dtype), _kv(3, dtype), state))


def _node(snapshot: Snapshot) -> SavedNode:
    return make_node(MODEL, "tenant", TOKENS, snapshot.start, pack(KINDS, snapshot))


def _written(path: Path, node: SavedNode) -> Path:
    with path.open("wb") as file:
        assert write_node(file, node) == file.tell()
    return path


def _assert_same(first: Snapshot, second: Snapshot) -> None:
    assert (first.start, first.stop, len(first.layers)) == (
        *(second.start, second.stop),
        len(second.layers),
    )
    for mine, other in zip(first.layers, second.layers, strict=True):
        assert type(mine) is type(other)
        if mine is None or other is None:
            continue
        if isinstance(mine, StatePiece) and isinstance(other, StatePiece):
            assert [s is None for s in mine.slots] == [s is None for s in other.slots]
        for a, b in zip(mine.arrays, other.arrays, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert bytes(memoryview(mx.contiguous(a))) == bytes(memoryview(mx.contiguous(b)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 3])
def test_round_trip(tmp_path: Path, dtype: mx.Dtype, start: int) -> None:
    live = _live(start, dtype)
    path = _written(tmp_path / "a", _node(live))
    node = read_node(path, MODEL, template_of(KINDS, live))
    _assert_same(node.snapshot(), live)
    for head in (node.head, read_head(path)):
        assert head.tokens.tolist() == list(TOKENS[start:])
        assert (head.start, head.stop, head.salt) == (start, 12, salt_digest("tenant"))
        assert [head.prefix] == prefix_digests(head.salt, np.array(TOKENS, np.int32), [start])
        assert not head.cuttable
    assert b"tenant" not in path.read_bytes()
    assert mx.load(str(path), format="safetensors")  # it is a safetensors file to others too


def test_parts_that_share_memory_and_layers_that_hold_nothing(tmp_path: Path) -> None:
    live = _live(0, mx.bfloat16).part(2, 11)
    node = make_node(MODEL, "", TOKENS[:11], 2, pack(KINDS, live))
    assert live.layers[2] is None
    _assert_same(read_node(_written(tmp_path / "a", node), MODEL).snapshot(), live)
    live = Snapshot(0, 12, (_kv(12), None, None))
    _assert_same(read_node(_written(tmp_path / "b", _node(live)), MODEL).snapshot(), live)


def test_bits_that_are_no_numbers_stay(tmp_path: Path) -> None:
    bits = mx.array([[[[0x7FC1, 0xFF80, 0x0001, 0x8000]]]], mx.uint16).view(mx.bfloat16)
    live = Snapshot(0, 1, (KVPiece(bits, bits),))
    node = make_node(MODEL, "", [7], 0, pack(KINDS[:1], live))
    _assert_same(read_node(_written(tmp_path / "a", node), MODEL).snapshot(), live)


def test_keys_without_values(tmp_path: Path) -> None:
    live = Snapshot(0, 12, (KVPiece(mx.ones((1, 1, 12, 4)), mx.zeros((1, 1, 12, 0))), None, None))
    _assert_same(read_node(_written(tmp_path / "a", _node(live)), MODEL).snapshot(), live)


def test_what_can_be_cut_says_so(tmp_path: Path) -> None:
    live = Snapshot(0, 12, (_kv(12), _kv(12)))
    node = make_node(MODEL, "", TOKENS, 0, pack(KINDS[:2], live))
    assert node.head.cuttable
    assert read_head(_written(tmp_path / "a", node)).cuttable


def test_types_that_files_cannot_hold() -> None:
    piece = KVPiece(mx.zeros((1, 1, 1, 1), mx.int8), mx.zeros((1, 1, 1, 1), mx.int8))
    with pytest.raises(SavedStateError, match="int8"):
        pack(KINDS[:1], Snapshot(0, 1, (piece,)))


# Every rule has a file that breaks it, and only it.


def _layer(i: int, **changes: Any) -> Callable[[SavedNode], SavedNode]:
    def change(node: SavedNode) -> SavedNode:
        layers = list(node.layers)
        layers[i] = layers[i]._replace(**changes)
        return replace(node, layers=tuple(layers))

    return change


def _head(**changes: Any) -> Callable[[SavedNode], SavedNode]:
    return lambda node: replace(node, head=replace(node.head, **changes))


def _zeros(*shape: int, dtype: str = "F32") -> Tensor:
    kind = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16, "I32": np.int32}[dtype]
    return Tensor(dtype, np.zeros(shape, kind))


def _two(*shape: int, dtype: str = "F32") -> tuple[Tensor, Tensor]:
    return _zeros(*shape, 4, dtype=dtype), _zeros(*shape, 6, dtype=dtype)


NODE_FAULTS = {
    "fingerprint": (_head(fingerprint="0" * 64), "another model"),
    "range": (_head(start=13), "starts at 13"),
    "start": (_head(start=2), "not those of"),
    "stop": (_head(stop=13), "not those of"),
    "negative": (_head(start=-1), "start is not a number"),
    "tokens rank": (_head(tokens=np.zeros((9, 1), np.int32)), "not those of"),
    "kind": (_layer(0, kind="FancyCache"), "known: KVCache"),
    "unsupported": (_layer(0, kind="QuantizedKVCache"), "QuantizedKVCache is not supported"),
    "nested": (_layer(0, kind="CacheList"), "not a layer"),
    "other kind": (_layer(0, kind="ArraysCache", meta=(2,)), "the model wants"),
    "full meta": (_layer(0, meta=(1,)), "has meta"),
    "full short": (_layer(0, tensors=_two(1, 2, 8)), "8 tokens of"),
    "full empty": (_layer(0, tensors=()), "0 tokens of"),
    "rank": (_layer(0, tensors=(_zeros(1, 9, 4), _zeros(1, 9, 4))), "not .1, heads"),
    "batch": (_layer(0, tensors=_two(2, 2, 9)), "not .1, heads"),
    "k and v": (_layer(0, tensors=(_zeros(1, 2, 9, 4), _zeros(1, 2, 8, 6))), "not .1, heads"),
    "heads of v": (_layer(0, tensors=(_zeros(1, 2, 9, 4), _zeros(1, 1, 9, 6))), "the model's is"),
    "no dim": (_layer(0, tensors=(_zeros(1, 2, 9, 0), _zeros(1, 2, 9, 6))), "the model's is"),
    "no heads": (_layer(0, tensors=_two(1, 0, 9)), "empty axis"),
    "no values": (_layer(0, tensors=(_zeros(1, 2, 9, 4),)), "values are missing"),
    "heads": (_layer(0, tensors=_two(1, 3, 9)), "the model's is"),
    "dim": (_layer(0, tensors=(_zeros(1, 2, 9, 5), _zeros(1, 2, 9, 6))), "the model's is"),
    "type": (_layer(0, tensors=_two(1, 2, 9, dtype="F16")), "F16, but the model's"),
    "odd type": (_layer(0, tensors=_two(1, 2, 9, dtype="I32")), "cannot be of I32"),
    "meta count": (_layer(1, meta=(0, 4, 12)), "needs 4 meta values"),
    "keep": (_layer(1, meta=(4, 4, 12, 3)), "kept for good"),
    "max_size": (_layer(1, meta=(0, 0, 12, 3)), "max_size of 0"),
    "window": (_layer(1, meta=(0, 5, 12, 3)), "window 5"),
    "offset": (_layer(1, meta=(0, 4, 11, 3)), "is at 11"),
    "cursor": (_layer(1, meta=(0, 4, 12, 4)), "cursor at 4 of 3"),
    "no negative meta": (_layer(1, meta=(0, 4, 12, -1)), "not described"),
    "long": (_layer(1, meta=(0, 4, 12, 13), tensors=_two(1, 2, 13)), "13 tokens at offset 12"),
    "longer than it covers": (_layer(1, meta=(0, 4, 12, 10), tensors=_two(1, 2, 10)), "10 tokens"),
    "empty at an offset": (_layer(1, tensors=()), "is empty, but"),
    "empty with a cursor": (_layer(1, meta=(0, 4, 0, 1), tensors=()), "is empty, but"),
    "slots": (_layer(2, meta=(99,)), "99 slots"),
    "state meta": (_layer(2, meta=(1, 2)), "of no layer|has meta"),
    "fewer slots": (_layer(2, meta=(2,)), "of no layer"),
    "no state": (_layer(2, meta=(3,), tensors=()), "no state"),
    "state rows": (_layer(2, tensors=(None, _zeros(2, 3, 5), _zeros(1, 2))), "state of shape"),
    "state shape": (_layer(2, tensors=(None, _zeros(1, 3, 6), _zeros(1, 2))), "the model's is"),
    "state count": (_layer(2, meta=(1,), tensors=(_zeros(1, 2),)), "1 arrays, not 3"),
    "layers": (lambda node: replace(node, layers=node.layers[:2]), "2 layers"),
}


@pytest.mark.parametrize("fault", NODE_FAULTS)
def test_node_that_breaks_a_rule(tmp_path: Path, fault: str) -> None:
    change, message = NODE_FAULTS[fault]
    live = _live()
    path = _written(tmp_path / "a", change(_node(live)))
    with pytest.raises(SavedStateError, match=message) as caught:
        read_node(path, MODEL, template_of(KINDS, live))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_template_of_layers_nobody_has_seen(tmp_path: Path) -> None:
    live = _live()
    path = _written(tmp_path / "a", _node(live))
    template: Template = [LayerTemplate(kind) for kind in KINDS]
    _assert_same(read_node(path, MODEL, template).snapshot(), live)
    assert template_of(KINDS, live)[0].arrays == (
        ArraySpec("F32", (1, 2, None, 4)),
        ArraySpec("F32", (1, 2, None, 6)),
    )


Header = dict[str, Any]


def _set(*path: str, to: Any) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        *outer, last = path
        for key in outer:
            header = header[key]
        header[last] = to

    return change


HEADER_FAULTS = {
    "format": (_set("__metadata__", "format", to="x"), "not of the format"),
    "metadata": (_set("__metadata__", "start", to=3), "not text"),
    "no metadata": (lambda header: header.pop("__metadata__"), "not of the format"),
    "layers": (_set("__metadata__", "layers", to="{"), "not described"),
    "layers' form": (_set("__metadata__", "layers", to="{}"), "not described"),
    "start": (_set("__metadata__", "start", to="3.0"), "start is not a number"),
    "big": (_set("__metadata__", "stop", to="99999999999"), "stop is not a number"),
    "checksum": (_set("__metadata__", "checksum", to="0"), "checksum"),
    "no checksum": (lambda header: header["__metadata__"].pop("checksum"), "checksum"),
    "salt": (_set("__metadata__", "salt", to="0"), "checksum"),
    "extra": (_set("tokens", "x", to=1), "not described properly"),
    "entry": (_set("tokens", to=[]), "not described properly"),
    "type": (_set("tokens", "dtype", to="Q4"), "no known type"),
    "token type": (_set("tokens", "dtype", to="U32"), "no int32 tokens"),
    "no tokens": (lambda header: header.update(other=header.pop("tokens")), "no int32 tokens"),
    "shape": (_set("tokens", "shape", to=[8]), "another shape"),
    "negative": (_set("tokens", "shape", to=[-9]), "not described properly"),
    "float": (_set("tokens", "shape", to=[9.0]), "not described properly"),
    "bool": (_set("tokens", "shape", to=[True]), "not described properly"),
    "rank": (_set("tokens", "shape", to=[1] * 8 + [9]), "not described properly"),
    "huge": (_set("tokens", "shape", to=[1 << 40, 1 << 40]), "another shape"),
    "offsets": (_set("tokens", "data_offsets", to=[0, 36, 36]), "not described properly"),
    "backwards": (_set("tokens", "data_offsets", to=[36, 0]), "beyond the file"),
    "beyond": (_set("tokens", "data_offsets", to=[1 << 30, (1 << 30) + 36]), "beyond the file"),
    "overlap": (_set("tokens", "data_offsets", to=[4, 40]), "overlap"),
}


def _split(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def _joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_header_that_breaks_a_rule(tmp_path: Path, fault: str) -> None:
    change, message = HEADER_FAULTS[fault]
    path = _written(tmp_path / "a", _node(_live()))
    header, data = _split(path)
    change(header)
    path.write_bytes(_joined(json.dumps(header).encode(), data))
    with pytest.raises(SavedStateError, match=message):
        read_node(path, MODEL)


GARBAGE = {
    "empty": b"",
    "short": b"\1\0\0",
    "length": b"\xff" * 8 + b"{}",
    "list": _joined(b"[]", b""),
    "deep": _joined(b"[" * 200_000, b""),
    "text": _joined(b"{\xff}", b""),
    "twins": _joined(b'{"a":1,"a":2}', b""),
    "digits": _joined(b'{"a":' + b"9" * 5000 + b"}", b""),
    "nothing": _joined(b"{}", b""),
    "rest": _joined(b"{}", b"x"),
    "no way to shape": _joined(
        b'{"a":{"dtype":"F32","shape":[0,99999999999999,99999999999999],"data_offsets":[0,0]}}',
        b"",
    ),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(GARBAGE[what])
    for read in (read_head, read_prompt_cache, lambda path: read_node(path, MODEL)):
        with pytest.raises(SavedStateError):
            read(path)


def test_what_cannot_be_read_names_its_cause(tmp_path: Path) -> None:
    for path, cause in ((tmp_path / "gone", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(SavedStateError, match=str(path)) as caught:
            read_node(path, MODEL)
        assert isinstance(caught.value.__cause__, cause)


def test_truncations_and_flipped_bits_never_give_another_snapshot(tmp_path: Path) -> None:
    live, path, rng = _live(), tmp_path / "a", random.Random(0)
    whole = _written(path, _node(live)).read_bytes()
    for length in (*rng.sample(range(len(whole)), 150), 8, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(SavedStateError):
            read_node(path, MODEL)
    refused = 0
    for _ in range(600):
        data, bit = bytearray(whole), rng.randrange(8 * len(whole))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            _assert_same(read_node(path, MODEL).snapshot(), live)
        except SavedStateError:
            refused += 1
    assert refused > 550  # the rest are spaces in the header


def test_data_is_all_that_the_checksum_is_of_and_its_meaning_too(tmp_path: Path) -> None:
    path = _written(tmp_path / "a", _node(_live()))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SavedStateError, match="checksum"):
        read_node(path, MODEL)


# Identity.


def test_fingerprints_differ_in_every_part(tmp_path: Path) -> None:
    parts: list[str | int | None] = ["llama", "{}", "bfloat16", 4, 64]
    assert fingerprint(*parts) == fingerprint(*parts)
    others = [[*parts[:i], "other", *parts[i + 1 :]] for i in range(len(parts))]
    assert len({fingerprint(*p) for p in (*others, parts, ["llama{}", *parts[2:]])}) == 7
    weights = tmp_path / "w"
    weights.write_bytes(bytes(100_000))
    before = weights_sample([weights], blocks=4, block=16)
    for place in (0, 99_999, 33_330):
        weights.write_bytes(bytes(place) + b"x" + bytes(99_999 - place))
        assert weights_sample([weights], blocks=4, block=16) != before
    weights.write_bytes(b"")
    assert weights_sample([weights]) != before


def test_prefix_digests_do_not_depend_on_where_nodes_are_cut() -> None:
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


# mlx-lm's files.


def _fed(cache: Any, steps: list[int], heads: int = 2, dim: int = 4) -> mx.array:
    """Feeds random keys, which are the values too; returns all of them."""
    keys = mx.random.normal((1, heads, sum(steps), dim))
    at = 0
    for step in steps:
        cache.update_and_fetch(keys[:, :, at : at + step], keys[:, :, at : at + step])
        at += step
    return keys


@pytest.mark.parametrize(
    "steps", [[5], [1] * 5, [8], [20], [1] * 20, [7, 1, 1, 1], [20, 1, 1, 1], [3, 9, 1], [20, 4]]
)
def test_mlx_lm_rotating_caches_in_temporal_order(tmp_path: Path, steps: list[int]) -> None:
    full, rotating = KVCache(), RotatingKVCache(8)
    keys, wrapped = _fed(full, steps), _fed(rotating, steps)
    path = tmp_path / "a.safetensors"
    save_prompt_cache(str(path), [full, rotating], {"model": "x"})
    snapshot = read_prompt_cache(path)
    assert (snapshot.start, snapshot.stop) == (0, sum(steps))
    piece, window = snapshot.layers
    assert isinstance(piece, KVPiece)
    assert isinstance(window, KVPiece)
    assert window.tokens >= min(7, sum(steps))
    assert mx.array_equal(piece.keys, keys)
    assert mx.array_equal(window.values, wrapped[:, :, -window.tokens :])


def test_mlx_lm_states_and_nested_caches(tmp_path: Path) -> None:
    arrays, inner, kv = ArraysCache(2), ArraysCache(1), KVCache()
    arrays[1] = mx.random.normal((1, 3)).astype(mx.bfloat16)
    inner[0] = mx.random.normal((1, 2, 2))
    keys = _fed(kv, [6])
    path = tmp_path / "a.safetensors"
    save_prompt_cache(str(path), [arrays, CacheList(inner, kv), ArraysCache(2)])
    expected = (
        StatePiece((None, arrays[1])),
        StatePiece((inner[0],)),
        KVPiece(keys, keys),
        None,
    )
    _assert_same(read_prompt_cache(path), Snapshot(0, 6, expected))
    with pytest.raises(SavedStateError, match="differ"):
        read_prompt_cache(path, tokens=7)
    save_prompt_cache(str(path), [arrays])
    with pytest.raises(SavedStateError, match="all recurrent"):
        read_prompt_cache(path)
    assert read_prompt_cache(path, tokens=9).stop == 9


@pytest.mark.parametrize("prompt", [5, 40])
def test_a_model_goes_on_from_its_mlx_lm_file(tmp_path: Path, prompt: int) -> None:
    model = tiny_model("gemma3", sliding_window=16)
    theirs, batch = make_prompt_cache(model), make_batch(model)
    tokens = mx.array([[(7 * i) % 200 + 3 for i in range(prompt + 21)]])
    model(tokens[:, :prompt], cache=theirs)
    for i in range(prompt, prompt + 20):
        model(tokens[:, i : i + 1], cache=theirs)
    path = tmp_path / "a.safetensors"
    save_prompt_cache(str(path), theirs)
    batch.join(Snapshot(0, 0, (None,) * 6))
    with batch.step(1):
        mx.eval(model(tokens[:, :1], cache=batch.layers))
    template = template_of(layer_kinds(model), batch.extract(0))
    batch.reset()
    batch.join(read_prompt_cache(path, prompt + 20, template))
    with batch.step(1):
        ours = model(tokens[:, -1:], cache=batch.layers)
    assert mx.allclose(ours, model(tokens[:, -1:], cache=theirs), atol=1e-4)


def test_files_of_older_mlx_lm(tmp_path: Path) -> None:
    rotating = RotatingKVCache(8)
    full, wrapped = mx.random.normal((1, 2, 20, 4)), _fed(rotating, [1] * 20)
    path = tmp_path / "a.safetensors"
    names = ("0.0", "0.1", "1.0", "1.1", "2.0")
    arrays = (full, full, rotating.keys, rotating.values, mx.ones((1, 3)))
    meta = dict(zip(("0.1.0", "0.1.1", "0.1.2", "0.1.3"), ("0", "8", "20", "4"), strict=True))
    kinds = {"2.0": "KVCache", "2.1": "RotatingKVCache", "2.2": "MambaCache"}
    metadata = {"0.0": "", "0.2": "", "1.model": "x"} | meta | kinds
    mx.save_safetensors(str(path), dict(zip(names, arrays, strict=True)), metadata)
    snapshot = read_prompt_cache(path)
    wanted = wrapped[:, :, -8:]
    expected = (KVPiece(full, full), KVPiece(wanted, wanted), StatePiece((mx.ones((1, 3)),)))
    _assert_same(snapshot, Snapshot(0, 20, expected))


def _cache(kind: Any, steps: list[int], **changes: Any) -> Any:
    _fed(kind, steps)
    for name, value in changes.items():
        setattr(kind, name, value)
    return kind


PROMPT_FAULTS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "quantized": (
        lambda: [QuantizedKVCache()],
        "QuantizedKVCache is not supported",
    ),
    "chunk beyond": (lambda: [_cache(ChunkedKVCache(8), [3], offset=300)], "has 256 of .0, 300"),
    "chunk ahead": (lambda: [_cache(ChunkedKVCache(8), [3], start_position=4)], "of .4, 3"),
    "chunk too short": (
        lambda: [_cache(ChunkedKVCache(4), [3], start_position=1)],
        "has .1, 3., but chunks of 4",
    ),
    "no chunk": (lambda: [_cache(ChunkedKVCache(0), [3])], "chunks of 0"),
    "unknown": (lambda: [type("Odd", (KVCache,), {})()], "'Odd' is unknown .known: KVCache"),
    "kept": (lambda: [_cache(RotatingKVCache(8, keep=4), [3])], "4 tokens kept for good"),
    "offset": (lambda: [_cache(KVCache(), [3], offset=257)], "offset 257 of 256"),
    "no number": (lambda: [_cache(KVCache(), [3], offset=1.5)], "no number"),
    "offsets": (lambda: [_cache(KVCache(), [3]), _cache(KVCache(), [4])], "offsets differ"),
    "cursor": (lambda: [_cache(RotatingKVCache(8), [20], _idx=21)], "cursor at 21"),
    "cursor in room": (lambda: [_cache(RotatingKVCache(300), [1] * 5, _idx=4)], "its cursor at 4"),
    "wraps early": (lambda: [_cache(RotatingKVCache(8), [5], _idx=2)], "wraps at 5"),
    "max_size": (lambda: [_cache(RotatingKVCache(8), [3], max_size=0)], "max_size of 0"),
    "too little": (lambda: [_cache(RotatingKVCache(8), [5], offset=9)], "5 of the 8 tokens"),
    "empty": (lambda: [_cache(RotatingKVCache(8), [], offset=3)], "is empty, but at 3"),
    "padded": (lambda: [ArraysCache(1, left_padding=[2])], "left padding"),
    "nothing": (lambda: [], "no caches"),
}


@pytest.mark.parametrize("fault", PROMPT_FAULTS)
def test_prompt_file_that_breaks_a_rule(tmp_path: Path, fault: str) -> None:
    make, message = PROMPT_FAULTS[fault]
    path = tmp_path / "a.safetensors"
    caches = make()
    if caches:
        save_prompt_cache(str(path), caches)
    else:
        mx.save_safetensors(str(path), {"a": mx.zeros(1)}, {"2.0": ""})
    with pytest.raises(SavedStateError, match=message):
        read_prompt_cache(path)


def test_prompt_files_cut_and_flipped_never_crash(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.safetensors", random.Random(1)
    caches = [KVCache(), RotatingKVCache(8), ArraysCache(2)]
    _fed(caches[0], [20])
    _fed(caches[1], [1] * 20)
    save_prompt_cache(str(path), caches)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(400):
        data = bytearray(whole)
        data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path.write_bytes(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
        with suppress(SavedStateError):
            read_prompt_cache(path)


def test_write_needs_no_mlx_arrays() -> None:
    layer = SavedLayer("KVCache", (), _two(1, 2, 12, dtype="BF16"))
    file = io.BytesIO()
    assert write_node(file, make_node(MODEL, "", TOKENS, 0, (layer,))) == len(file.getvalue())
