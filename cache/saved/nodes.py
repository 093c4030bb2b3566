"""Nodes of the prefix tree as safetensors files, one node a file.

A ``SavedNode`` is plain memory, so any thread may read, check and write it; only
``SavedNode.snapshot`` touches MLX.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
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
    """The head of a node's file: which tokens of which model it covers.

    Attributes:
        fingerprint: the model, see ``fingerprint``.
        salt: the salt's digest.
        prefix: digest of all tokens before ``start``, see ``prefix_digests``.
        start: the position of its first token.
        stop: the position behind its last token.
        tokens: the tokens ``[start, stop)``, int32.
        cuttable: whether a sequence can resume after any of its tokens, not only after the last.
        nbytes: bytes of the tensors.
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
    """A node in plain memory, outside MLX."""

    head: NodeHead
    layers: tuple[SavedLayer, ...]

    def snapshot(self) -> Snapshot:
        """The node as an evaluated snapshot with arrays of its own; uses MLX."""
        return unpack(self.head.start, self.head.stop, self.layers)


def fingerprint(*identity: str | int | None) -> str:
    """A digest of everything that a model's KV depends on: 64 hexadecimal digits.

    Args:
        identity: architecture, config.json, type of the KV, bits and group size of its
            quantization, ``weights_sample``; in this order.
    """
    return hashlib.sha256(json.dumps([FORMAT, *identity]).encode()).hexdigest()


def weights_sample(
    files: Mapping[Path, Sequence[int]], blocks: int = 256, block: int = 4096
) -> str:
    """A digest of each file's size and of some of its blocks, of ``block`` bytes each.

    These are the first one of each tensor, because a model may differ from another in a few small
    tensors only, and ``blocks`` evenly spaced ones, for large tensors that differ in a part.

    Args:
        files: the positions of the first byte of each file's tensors.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path, tensors in files.items():
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size};".encode())
            spaced = (max(0, size - block) * i // max(1, blocks - 1) for i in range(blocks))
            for start in sorted({*spaced, *tensors}):
                file.seek(start)
                digest.update(file.read(block))
    return digest.hexdigest()


def make_node(
    model: str, salt: str, tokens: Sequence[int], start: int, layers: tuple[SavedLayer, ...]
) -> SavedNode:
    """Makes a node of ``tokens[start:]``; no MLX.

    Args:
        model: the fingerprint.
        salt: the client's ``cache_salt``; only its digest is stored.
        tokens: all tokens from position 0.
        start: the position of the node's first token.
        layers: the result of ``pack``.
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
    """Makes a node of ``tokens``, which follow the first ``start`` tokens of a path; no MLX.

    Args:
        model: the fingerprint.
        before: digest of the path before ``tokens``.
        tokens: the node's tokens.
        start: the position of the first of them.
        layers: the result of ``pack``.
    """
    ids = int32(tokens)
    tensors = [t for layer in layers for t in layer.tensors if t is not None]
    cuttable = all(layer.kind != ARRAYS and layer.tokens == len(ids) for layer in layers)
    nbytes = sum(tensor.data.nbytes for tensor in tensors) + ids.nbytes
    place = (before.salt, before.hexdigest(), start, start + len(ids))
    return SavedNode(NodeHead(model, *place, ids, cuttable, nbytes), layers)


def write_node(file: BinaryIO, node: SavedNode) -> int:
    """Writes a node; returns the bytes written. No MLX. Raises OSError."""
    head = node.head
    tensors = {"tokens": Tensor("I32", head.tokens)} | {
        f"layers.{i}.{j}": tensor
        for i, layer in enumerate(node.layers)
        for j, tensor in enumerate(layer.tensors)
        if tensor is not None
    }
    # Wide types first, so that every array is aligned to its item size.
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
    """Reads the head of a node's file without verifying the checksum; no MLX.

    Raises:
        SavedStateError: the file is not a node's file, or cannot be read.
    """
    with opened(path) as file:
        header = read_header(file)
        head, _ = _head(header, header.read(file, "tokens"))
        return head


def read_node(path: Path, model: str, template: Template | None = None) -> SavedNode:
    """Reads and verifies a node's file; no MLX.

    Args:
        path: the file.
        model: the required fingerprint.
        template: the required types and shapes of the layers.

    Raises:
        SavedStateError: the file cannot be read, or is not valid.
    """
    with opened(path) as file:
        return node_of(file, model, template)


def node_of(file: BinaryIO, model: str, template: Template | None = None) -> SavedNode:
    """As ``read_node``, for an open file at its beginning.

    Raises:
        SavedStateError: the file is not valid.
        OSError: the file cannot be read.
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
        layer_tensors = tuple(tensors.pop(f"layers.{i}.{j}", None) for j in range(count))
        layers.append(SavedLayer(kind, meta, layer_tensors))
    require(not tensors, f"tensors of no layer: {', '.join(sorted(tensors)[:3])}")
    check_layers(layers, head.start, head.stop, template)
    return SavedNode(head, tuple(layers))


def _head(
    header: Header, tokens: Tensor | None
) -> tuple[NodeHead, list[tuple[str, tuple[int, ...]]]]:
    """Reads a file's head, and the kind and meta of each layer."""
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
    cuttable = True
    for i, (kind, _) in enumerate(described):
        spec = header.specs.get(f"layers.{i}.0")
        cuttable &= kind != ARRAYS and spec is not None and spec.shape[2:3] == (stop - start,)
    model, salt, prefix = digests
    head = NodeHead(model, salt, prefix, start, stop, tokens.data, cuttable, header.nbytes)
    return head, described


def _described(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Parses the kind and meta of each layer from a file's metadata."""
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
