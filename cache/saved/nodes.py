"""Snapshots in safetensors files, one each.

A file is read in two halves, as it is written: ``SavedNode`` is plain memory, read, checked and
written by any thread; only ``SavedNode.snapshot`` touches MLX.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from chairlift.cache.path_digest import PathDigest, int32
from chairlift.cache.saved.layers import (
    ARRAYS,
    SavedLayer,
    Template,
    canonical,
    check_layers,
    unpack,
)
from chairlift.cache.saved.safetensors import (
    MAX_RANK,
    Array,
    Header,
    SavedStateError,
    Spec,
    Tensor,
    digest_of,
    integer,
    natural,
    opened,
    read_header,
    require,
)
from chairlift.cache.snapshot import Snapshot

FORMAT = "chairlift-prefix-1"


@dataclass(frozen=True, slots=True, eq=False)
class NodeHead:
    """What a file is of: tokens ``[start, stop)`` behind a prefix, for one model and one salt.

    ``salt`` is ``salt_digest``, ``prefix`` the ``prefix_digests`` of all tokens before ``start``;
    ``tokens`` are int32. ``cuttable``: any first part of it is of use, not only the whole.
    ``nbytes`` counts the tensors.
    """

    fingerprint: str
    salt: str
    prefix: str
    start: int
    stop: int
    tokens: Array
    cuttable: bool
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class SavedNode:
    """A snapshot outside MLX."""

    head: NodeHead
    layers: tuple[SavedLayer, ...]

    def snapshot(self) -> Snapshot:
        """In arrays of its own, evaluated; only in a thread that may use MLX."""
        return unpack(self.head.start, self.head.stop, self.layers)


def fingerprint(*identity: str | int | None) -> str:
    """Names a model by all that its KV depends on: 64 hexadecimal digits.

    That is: architecture, config.json, type of the KV, bits and group size of its quantization,
    ``weights_sample``. The order counts.
    """
    return hashlib.sha256(json.dumps([FORMAT, *identity]).encode()).hexdigest()


def weights_sample(files: Sequence[Path], blocks: int = 256, block: int = 4096) -> str:
    """A digest of each file's size and of ``blocks`` pieces of it, of ``block`` bytes, evenly set.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size};".encode())
            for i in range(blocks):
                file.seek((size - block) * i // max(1, blocks - 1) if size > block else 0)
                digest.update(file.read(block))
    return digest.hexdigest()


def make_node(
    model: str, salt: str, tokens: Sequence[int], start: int, layers: tuple[SavedLayer, ...]
) -> SavedNode:
    """A node of ``tokens[start:]``, all tokens from the root given; no MLX.

    Args:
        model: the fingerprint.
        salt: as the user gave it; only its digest is kept.
        layers: as ``pack`` gives them.
    """
    before = PathDigest(salt).continued(tokens[:start])
    return node_behind(model, before, tokens[start:], start, layers)


def node_behind(
    model: str,
    before: PathDigest,
    tokens: Sequence[int],
    start: int,
    layers: tuple[SavedLayer, ...],
) -> SavedNode:
    """A node of ``tokens``, which follow the first ``start`` tokens of a path; no MLX.

    Args:
        model: the fingerprint.
        before: of these first tokens.
        layers: as ``pack`` gives them.
    """
    ids = int32(tokens)
    held = [t for layer in layers for t in layer.tensors if t is not None]
    whole = [layer.kind != ARRAYS and layer.tokens == len(ids) for layer in layers]
    nbytes = sum(tensor.data.nbytes for tensor in held) + ids.nbytes
    place = (before.salt, before.hexdigest(), start, start + len(ids))
    return SavedNode(NodeHead(model, *place, ids, all(whole), nbytes), layers)


def write_node(file: BinaryIO, node: SavedNode) -> int:
    """Writes a node; returns the bytes. No MLX. Raises OSError."""
    head = node.head
    tensors = {"tokens": Tensor("I32", head.tokens)} | {
        f"layers.{i}.{j}": tensor
        for i, layer in enumerate(node.layers)
        for j, tensor in enumerate(layer.tensors)
        if tensor is not None
    }
    # Wide types first: every array then lies at a multiple of its item's size.
    order = sorted(tensors.items(), key=lambda item: -item[1].data.itemsize)
    specs, end = {}, 0
    for name, (dtype, data) in order:
        begin, end = end, end + data.nbytes
        specs[name] = Spec(dtype, data.shape, begin, end)
    metadata = {
        "format": FORMAT,
        "fingerprint": head.fingerprint,
        "salt": head.salt,
        "prefix": head.prefix,
        "start": str(head.start),
        "stop": str(head.stop),
        "layers": json.dumps([[layer.kind, layer.meta] for layer in node.layers]),
    }
    buffers = [np.ascontiguousarray(tensor.data).reshape(-1).view("u1") for _, tensor in order]
    metadata["checksum"] = digest_of(metadata, specs, [buffer.data for buffer in buffers])
    text = json.dumps({"__metadata__": metadata} | {n: s.as_json() for n, s in specs.items()})
    header = text.encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for buffer in buffers:
        file.write(buffer.data)
    return 8 + len(header) + end


def read_head(path: Path) -> NodeHead:
    """What a file says that it is of. Its checksum is not verified; no MLX.

    Raises:
        SavedStateError: it is not a node's file, or cannot be read.
    """
    with opened(path) as file:
        header = read_header(file)
        head, _ = _head(header, header.read(file, "tokens"))
        return head


def read_node(path: Path, model: str, template: Template | None = None) -> SavedNode:
    """A node's file, verified; no MLX.

    Args:
        path: the file.
        model: the fingerprint it must have.
        template: what its layers must look like.

    Raises:
        SavedStateError: it cannot be read, or is not what it should be.
    """
    with opened(path) as file:
        return node_of(file, model, template)


def node_of(file: BinaryIO, model: str, template: Template | None = None) -> SavedNode:
    """The same for an open file, at its beginning.

    Raises:
        SavedStateError: it is not what it should be.
        OSError: it cannot be read.
    """
    header = read_header(file)
    tensors, data = header.read_all(file)
    head, described = _head(header, tensors.pop("tokens", None))
    require(head.fingerprint == model, "it is of another model")
    metadata = {k: v for k, v in header.metadata.items() if k != "checksum"}
    checksum = digest_of(metadata, header.specs, [data])
    require(checksum == header.metadata.get("checksum"), "the checksum is wrong")
    layers = []
    for i, (kind, meta) in enumerate(described):
        names = [n for n in tensors if n.startswith(f"layers.{i}.")]
        count = meta[0] if kind == ARRAYS and len(meta) == 1 else len(names)
        require(count <= MAX_RANK * MAX_RANK, f"layer {i} has {count} slots")
        held = tuple(tensors.pop(f"layers.{i}.{j}", None) for j in range(count))
        layers.append(SavedLayer(kind, meta, held))
    require(not tensors, f"tensors of no layer: {', '.join(sorted(tensors)[:3])}")
    check_layers(layers, head.start, head.stop, template)
    return SavedNode(head, tuple(layers))


def _head(
    header: Header, tokens: Tensor | None
) -> tuple[NodeHead, list[tuple[str, tuple[int, ...]]]]:
    """What the file is of, and its layers' kinds and meta."""
    metadata = header.metadata
    require(metadata.get("format") == FORMAT, f"it is not of the format {FORMAT}")
    start, stop = (integer(metadata.get(key), key) for key in ("start", "stop"))
    require(start <= stop, f"it starts at {start} and stops at {stop}")
    require(tokens is not None and tokens.dtype == "I32", "it has no int32 tokens")
    assert tokens is not None
    shape = tokens.data.shape
    require(shape == (stop - start,), f"tokens {shape} are not those of [{start}, {stop})")
    described = _described(metadata.get("layers", ""))
    digests = [metadata.get(key, "") for key in ("fingerprint", "salt", "prefix")]
    whole = True
    for i, (kind, _) in enumerate(described):
        spec = header.specs.get(f"layers.{i}.0")
        whole &= kind != ARRAYS and spec is not None and spec.shape[2:3] == (stop - start,)
    model, salt, prefix = digests
    head = NodeHead(model, salt, prefix, start, stop, tokens.data, whole, header.nbytes)
    return head, described


def _described(text: str) -> list[tuple[str, tuple[int, ...]]]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SavedStateError("its layers are not described") from error
    described: list[tuple[str, tuple[int, ...]]] = []
    require(isinstance(entries, list), "its layers are not described")
    for entry in entries:
        require(
            isinstance(entry, list)
            and len(entry) == 2
            and isinstance(entry[0], str)
            and isinstance(entry[1], list)
            and all(natural(number) for number in entry[1]),
            "its layers are not described",
        )
        described.append((canonical(entry[0]), tuple(entry[1])))
    return described
