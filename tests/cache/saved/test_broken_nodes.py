"""Files of nodes with an error in them: each is refused, and the message names the error."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cache.saved import (
    KINDS,
    MODEL,
    assert_same_snapshot,
    live_snapshot,
    saved_node,
    write_file,
    zero_kv,
    zeros,
)

from chairlift.cache.saved.layers import template_of
from chairlift.cache.saved.nodes import SavedNode, read_head, read_node
from chairlift.cache.saved.promptfile import read_prompt_cache
from chairlift.cache.saved.safetensors import SavedStateError

# Each fault breaks exactly one rule of the format.


def with_layer(i: int, **changes: Any) -> Callable[[SavedNode], SavedNode]:
    def change(node: SavedNode) -> SavedNode:
        layers = list(node.layers)
        layers[i] = layers[i]._replace(**changes)
        return replace(node, layers=tuple(layers))

    return change


def with_head(**changes: Any) -> Callable[[SavedNode], SavedNode]:
    return lambda node: replace(node, head=replace(node.head, **changes))


NODE_FAULTS = {
    "fingerprint": (with_head(fingerprint="0" * 64), "another model"),
    "range": (with_head(start=13), "starts at 13"),
    "start": (with_head(start=2), "not those of"),
    "stop": (with_head(stop=13), "not those of"),
    "negative": (with_head(start=-1), "start is not a number"),
    "tokens rank": (with_head(tokens=np.zeros((9, 1), np.int32)), "not those of"),
    "kind": (with_layer(0, kind="FancyCache"), "known: KVCache"),
    "unsupported": (with_layer(0, kind="QuantizedKVCache"), "QuantizedKVCache is not supported"),
    "nested": (with_layer(0, kind="CacheList"), "not a layer"),
    "other kind": (with_layer(0, kind="ArraysCache", meta=(2,)), "the model wants"),
    "full meta": (with_layer(0, meta=(1,)), "has meta"),
    "full short": (with_layer(0, tensors=zero_kv(1, 2, 8)), "8 tokens of"),
    "full empty": (with_layer(0, tensors=()), "0 tokens of"),
    "rank": (with_layer(0, tensors=(zeros(1, 9, 4), zeros(1, 9, 4))), "not .1, heads"),
    "batch": (with_layer(0, tensors=zero_kv(2, 2, 9)), "not .1, heads"),
    "k and v": (with_layer(0, tensors=(zeros(1, 2, 9, 4), zeros(1, 2, 8, 6))), "not .1, heads"),
    "heads of v": (with_layer(0, tensors=(zeros(1, 2, 9, 4), zeros(1, 1, 9, 6))), "the model's is"),
    "no dim": (with_layer(0, tensors=(zeros(1, 2, 9, 0), zeros(1, 2, 9, 6))), "the model's is"),
    "no heads": (with_layer(0, tensors=zero_kv(1, 0, 9)), "the model's is"),
    "no heads of k": (with_layer(0, tensors=(zeros(1, 0, 9, 4), zeros(1, 2, 9, 6))), "empty axis"),
    "no tokens": (with_layer(0, tensors=zero_kv(1, 2, 0)), "empty axis"),
    "no values": (with_layer(0, tensors=(zeros(1, 2, 9, 4),)), "values are missing"),
    "heads": (with_layer(0, tensors=zero_kv(1, 3, 9)), "the model's is"),
    "dim": (with_layer(0, tensors=(zeros(1, 2, 9, 5), zeros(1, 2, 9, 6))), "the model's is"),
    "type": (
        with_layer(0, tensors=zero_kv(1, 2, 9, dtype="F16")),
        "F16, but the model's",
    ),
    "odd type": (
        with_layer(0, tensors=zero_kv(1, 2, 9, dtype="I16")),
        "cannot be of I16",
    ),
    "meta count": (with_layer(1, meta=(0, 4, 12)), "needs 4 meta values"),
    "keep": (with_layer(1, meta=(4, 4, 12, 3)), "kept for good"),
    "max_size": (with_layer(1, meta=(0, 0, 12, 3)), "max_size of 0"),
    "window": (with_layer(1, meta=(0, 5, 12, 3)), "window 5"),
    "offset": (with_layer(1, meta=(0, 4, 11, 3)), "is at 11"),
    "cursor": (with_layer(1, meta=(0, 4, 12, 4)), "cursor at 4 of 3"),
    "no negative meta": (with_layer(1, meta=(0, 4, 12, -1)), "not described"),
    "long": (
        with_layer(1, meta=(0, 4, 12, 13), tensors=zero_kv(1, 2, 13)),
        "13 tokens at offset 12",
    ),
    "longer than it covers": (
        with_layer(1, meta=(0, 4, 12, 10), tensors=zero_kv(1, 2, 10)),
        "10 tokens",
    ),
    "empty at an offset": (with_layer(1, tensors=()), "is empty, but"),
    "empty with a cursor": (with_layer(1, meta=(0, 4, 0, 1), tensors=()), "is empty, but"),
    "slots": (with_layer(2, meta=(99,)), "99 slots"),
    "state meta": (with_layer(2, meta=(1, 2)), "of no layer|has meta"),
    "fewer slots": (with_layer(2, meta=(2,)), "of no layer"),
    "no state": (with_layer(2, meta=(3,), tensors=()), "no state"),
    "state rows": (with_layer(2, tensors=(None, zeros(2, 3, 5), zeros(1, 2))), "state of shape"),
    "state shape": (with_layer(2, tensors=(None, zeros(1, 3, 6), zeros(1, 2))), "the model's is"),
    "state count": (with_layer(2, meta=(1,), tensors=(zeros(1, 2),)), "1 arrays, not 3"),
    "layers": (lambda node: replace(node, layers=node.layers[:2]), "2 layers"),
}


@pytest.mark.parametrize("fault", NODE_FAULTS)
def test_a_node_that_breaks_a_rule_is_refused(tmp_path: Path, fault: str) -> None:
    change, message = NODE_FAULTS[fault]
    live = live_snapshot()
    path = write_file(tmp_path / "a", change(saved_node(live)))
    with pytest.raises(SavedStateError, match=message) as caught:
        read_node(path, MODEL, template_of(KINDS, live))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


Header = dict[str, Any]


def set_field(*path: str, to: Any) -> Callable[[Header], None]:
    def change(header: Header) -> None:
        *outer, last = path
        for key in outer:
            header = header[key]
        header[last] = to

    return change


HEADER_FAULTS = {
    "format": (set_field("__metadata__", "format", to="x"), "not of the format"),
    "metadata": (set_field("__metadata__", "start", to=3), "not text"),
    "no metadata": (lambda header: header.pop("__metadata__"), "not of the format"),
    "layers": (set_field("__metadata__", "layers", to="{"), "not described"),
    "layers' form": (set_field("__metadata__", "layers", to="{}"), "not described"),
    "start": (set_field("__metadata__", "start", to="3.0"), "start is not a number"),
    "big": (set_field("__metadata__", "stop", to="99999999999"), "stop is not a number"),
    "checksum": (set_field("__metadata__", "checksum", to="0"), "checksum"),
    "no checksum": (lambda header: header["__metadata__"].pop("checksum"), "checksum"),
    "salt": (set_field("__metadata__", "salt", to="0"), "checksum"),
    "extra": (set_field("tokens", "x", to=1), "not described properly"),
    "entry": (set_field("tokens", to=[]), "not described properly"),
    "type": (set_field("tokens", "dtype", to="Q4"), "no known type"),
    "token type": (set_field("tokens", "dtype", to="U32"), "no int32 tokens"),
    "no tokens": (lambda header: header.update(other=header.pop("tokens")), "no int32 tokens"),
    "shape": (set_field("tokens", "shape", to=[8]), "another shape"),
    "negative": (set_field("tokens", "shape", to=[-9]), "not described properly"),
    "float": (set_field("tokens", "shape", to=[9.0]), "not described properly"),
    "bool": (set_field("tokens", "shape", to=[True]), "not described properly"),
    "rank": (set_field("tokens", "shape", to=[1] * 8 + [9]), "not described properly"),
    "huge": (set_field("tokens", "shape", to=[1 << 40, 1 << 40]), "another shape"),
    "offsets": (set_field("tokens", "data_offsets", to=[0, 36, 36]), "not described properly"),
    "backwards": (set_field("tokens", "data_offsets", to=[36, 0]), "beyond the file"),
    "beyond": (
        set_field("tokens", "data_offsets", to=[1 << 30, (1 << 30) + 36]),
        "beyond the file",
    ),
    "overlap": (set_field("tokens", "data_offsets", to=[4, 40]), "overlap"),
}


def split_file(path: Path) -> tuple[Header, bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join_file(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("fault", HEADER_FAULTS)
def test_a_header_that_breaks_a_rule_is_refused(tmp_path: Path, fault: str) -> None:
    change, message = HEADER_FAULTS[fault]
    path = write_file(tmp_path / "a", saved_node(live_snapshot()))
    header, data = split_file(path)
    change(header)
    path.write_bytes(join_file(json.dumps(header).encode(), data))
    with pytest.raises(SavedStateError, match=message):
        read_node(path, MODEL)


GARBAGE = {
    "empty": b"",
    "short": b"\1\0\0",
    "length": b"\xff" * 8 + b"{}",
    "list": join_file(b"[]", b""),
    "deep": join_file(b"[" * 200_000, b""),
    "text": join_file(b"{\xff}", b""),
    "twins": join_file(b'{"a":1,"a":2}', b""),
    "digits": join_file(b'{"a":' + b"9" * 5000 + b"}", b""),
    "nothing": join_file(b"{}", b""),
    "rest": join_file(b"{}", b"x"),
    "no way to shape": join_file(
        b'{"a":{"dtype":"F32","shape":[0,99999999999999,99999999999999],"data_offsets":[0,0]}}',
        b"",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(GARBAGE[name])
    for read in (read_head, read_prompt_cache, lambda path: read_node(path, MODEL)):
        with pytest.raises(SavedStateError):
            read(path)


def test_an_unreadable_path_names_its_cause(tmp_path: Path) -> None:
    for path, cause in ((tmp_path / "gone", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(SavedStateError, match=str(path)) as caught:
            read_node(path, MODEL)
        assert isinstance(caught.value.__cause__, cause)


def test_truncations_and_flipped_bits_never_give_another_snapshot(tmp_path: Path) -> None:
    live, path, rng = live_snapshot(), tmp_path / "a", random.Random(0)
    content = write_file(path, saved_node(live)).read_bytes()
    for length in (*rng.sample(range(len(content)), 150), 8, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(SavedStateError):
            read_node(path, MODEL)
    refused = 0
    for _ in range(600):
        data, bit = bytearray(content), rng.randrange(8 * len(content))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            assert_same_snapshot(read_node(path, MODEL).snapshot(), live)
        except SavedStateError:
            refused += 1
    assert refused > 550  # the rest are spaces in the header


def test_the_checksum_covers_the_data(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a", saved_node(live_snapshot()))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SavedStateError, match="checksum"):
        read_node(path, MODEL)
