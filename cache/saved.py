"""Snapshots in safetensors files, one each, and what mlx-lm saves of its prompt caches.

A file is read in two halves, as it is written: ``SavedNode`` is plain memory, read, checked and
written by any thread; only ``pack`` and ``SavedNode.snapshot`` touch MLX. Nothing of a file is
believed: its header is parsed within bounds, and everything in it is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from chairlift.cache.snapshot import KVPiece, LayerKind, Piece, Snapshot, StatePiece

FORMAT = "chairlift-prefix-1"
FULL, ROTATING, ARRAYS = "KVCache", "RotatingKVCache", "ArraysCache"
NESTED = "CacheList"
SUPPORTED = (FULL, ROTATING, ARRAYS)
KNOWN = (
    *(*SUPPORTED, NESTED, "QuantizedKVCache", "ChunkedKVCache"),
    *("BatchKVCache", "BatchRotatingKVCache"),
)
ALIASES = {
    "ConcatenateKVCache": FULL,
    "KVCacheSimple": FULL,
    "StandardKvCache": FULL,
    "RotatingKvCache": ROTATING,
    "MambaCache": ARRAYS,
    "StandardQuantizedKvCache": "QuantizedKVCache",
}
# safetensors' types; numpy has no bfloat16, whose bits are kept as they are.
_NUMPY = {
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4"},
    **{"I32": "<i4", "U64": "<u8", "I64": "<i8", "F64": "<f8"},
    **{"BF16": "<u2", "F16": "<f2", "F32": "<f4"},
}
_MLX = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32, "U32": mx.uint32}
_MAX_HEADER = 64 << 20
_MAX_RANK = 8
_MAX_TOKENS = 1 << 31

Array = npt.NDArray[Any]


class SavedStateError(Exception):
    """A file is not a state that can be used, in one line. An OSError is the cause, if one was."""


class Tensor(NamedTuple):
    """An array's memory and its safetensors type; bfloat16 as uint16."""

    dtype: str
    data: Array


class SavedLayer(NamedTuple):
    """A layer as mlx-lm's files name it; no tensors if it holds nothing.

    The meta of a rotating layer is ``(keep, max_size, offset, cursor)``, that of arrays the number
    of their slots (nothing, where there is no state), and a full one has none.
    """

    kind: str
    meta: tuple[int, ...] = ()
    tensors: tuple[Tensor | None, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of an attention layer's tensors."""
        first = self.tensors[0] if self.tensors else None
        return int(first.data.shape[2]) if first is not None else 0


class ArraySpec(NamedTuple):
    """An array's safetensors type and shape; the axis of tokens is None."""

    dtype: str
    shape: tuple[int | None, ...]


class LayerTemplate(NamedTuple):
    """What a layer of a model must look like; ``arrays`` is None as long as nobody has seen one."""

    kind: LayerKind
    arrays: tuple[ArraySpec | None, ...] | None = None


Template = Sequence[LayerTemplate]


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
        return _snapshot(self.head.start, self.head.stop, self.layers)


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


def salt_digest(salt: str) -> str:
    """What a file tells of a salt."""
    return hashlib.sha256(salt.encode()).hexdigest()


def prefix_digests(salt: str, tokens: Array, positions: Sequence[int]) -> list[str]:
    """What identifies ``tokens[:position]`` under a salt's digest, for each of rising positions."""
    digest = hashlib.sha256(salt.encode())
    digests, done = [], 0
    for position in positions:
        digest.update(np.ascontiguousarray(tokens[done:position], "<i4").data)
        digests.append(digest.hexdigest())
        done = position
    return digests


def template_of(kinds: Sequence[LayerKind], snapshot: Snapshot) -> list[LayerTemplate]:
    """What every snapshot of a model must look like, given a live one of it."""
    templates = []
    for kind, piece in zip(kinds, snapshot.layers, strict=True):
        specs: tuple[ArraySpec | None, ...] | None = None
        if isinstance(piece, KVPiece):
            shapes = [(*a.shape[:2], None, a.shape[3]) for a in piece.arrays]
            names = [_name(array) for array in piece.arrays]
            specs = tuple(map(ArraySpec, names, shapes))
        elif isinstance(piece, StatePiece):
            specs = tuple(s if s is None else ArraySpec(_name(s), s.shape) for s in piece.slots)
        templates.append(LayerTemplate(kind, specs))
    return templates


def pack(kinds: Sequence[LayerKind], snapshot: Snapshot) -> tuple[SavedLayer, ...]:
    """A snapshot as views of its memory, which it keeps alive; evaluates it.

    Raises:
        SavedStateError: it has a kind of piece or a type that files cannot hold.
    """
    mx.eval(snapshot.arrays)
    pieces = zip(kinds, snapshot.layers, strict=True)
    return tuple(_packed(kind, piece, snapshot.stop) for kind, piece in pieces)


def make_node(
    model: str, salt: str, tokens: Sequence[int], start: int, layers: tuple[SavedLayer, ...]
) -> SavedNode:
    """A node of ``tokens[start:]``, all tokens from the root given; no MLX.

    Args:
        model: the fingerprint.
        salt: as the user gave it; only its digest is kept.
        layers: as ``pack`` gives them.
    """
    ids = np.asarray(tokens, "<i4")
    hidden = salt_digest(salt)
    (prefix,) = prefix_digests(hidden, ids, [start])
    held = [t for layer in layers for t in layer.tensors if t is not None]
    whole = [layer.kind != ARRAYS and layer.tokens == len(ids) - start for layer in layers]
    nbytes = sum(tensor.data.nbytes for tensor in held) + ids[start:].nbytes
    head = NodeHead(model, hidden, prefix, start, len(ids), ids[start:], all(whole), nbytes)
    return SavedNode(head, layers)


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
        specs[name] = _Spec(dtype, data.shape, begin, end)
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
    metadata["checksum"] = _checksum(metadata, specs, [buffer.data for buffer in buffers])
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
    with _opened(path) as file:
        header = _read_header(file)
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
    with _opened(path) as file:
        header = _read_header(file)
        tensors, data = header.read_all(file)
        head, described = _head(header, tensors.pop("tokens", None))
        _require(head.fingerprint == model, "it is of another model")
        metadata = {k: v for k, v in header.metadata.items() if k != "checksum"}
        checksum = _checksum(metadata, header.specs, [data])
        _require(checksum == header.metadata.get("checksum"), "the checksum is wrong")
        layers = []
        for i, (kind, meta) in enumerate(described):
            names = [n for n in tensors if n.startswith(f"layers.{i}.")]
            count = meta[0] if kind == ARRAYS and len(meta) == 1 else len(names)
            _require(count <= _MAX_RANK * _MAX_RANK, f"layer {i} has {count} slots")
            held = tuple(tensors.pop(f"layers.{i}.{j}", None) for j in range(count))
            layers.append(SavedLayer(kind, meta, held))
        _require(not tensors, f"tensors of no layer: {', '.join(sorted(tensors)[:3])}")
        _check_layers(layers, head.start, head.stop, template)
        return SavedNode(head, tuple(layers))


def read_prompt_cache(
    path: Path, tokens: int | None = None, template: Template | None = None
) -> Snapshot:
    """A file of mlx-lm's ``save_prompt_cache`` as a snapshot of ``[0, tokens)``; uses MLX.

    Args:
        path: the file.
        tokens: how many it must be of; only needed where no layer tells, being recurrent.
        template: what its layers must look like; those of a CacheList are counted one by one.

    Raises:
        SavedStateError: it cannot be read, is inconsistent, or has a kind of cache not supported.
    """
    with _opened(path) as file:
        header = _read_header(file)
        layers = list(_PromptFile(header.metadata, header.read_all(file)[0]).layers())
        _require(bool(layers), "it has no caches")
        told = {layer.meta[2] if layer.kind == ROTATING else layer.tokens for layer in layers
                if layer.kind != ARRAYS}  # fmt: skip
        told |= set() if tokens is None else {tokens}
        _require(bool(told), "its caches are all recurrent and do not tell of how many tokens")
        _require(len(told) == 1, f"the offsets differ: {sorted(told)} tokens")
        (stop,) = told
        _check_layers(layers, 0, stop, template)
        return _snapshot(0, stop, layers)


# From MLX and to it.


def _name(array: mx.array) -> str:
    for name, dtype in _MLX.items():
        if dtype == array.dtype:
            return name
    raise SavedStateError(f"an array of {array.dtype} cannot be saved")


def _packed(kind: LayerKind, piece: Piece | None, stop: int) -> SavedLayer:
    if kind.recurrent:
        slots = piece.slots if isinstance(piece, StatePiece) else ()
        count = (len(slots),) if slots else ()
        return SavedLayer(ARRAYS, count, tuple(None if s is None else _view(s) for s in slots))
    if piece is not None and not isinstance(piece, KVPiece):
        raise SavedStateError(f"a {type(piece).__name__} cannot be saved")
    tensors = tuple(_view(array) for array in piece.arrays) if piece else ()
    if kind.window is None:
        return SavedLayer(FULL, (), tensors)
    meta = (0, kind.window, stop, piece.tokens) if piece else (0, kind.window, 0, 0)
    return SavedLayer(ROTATING, meta, tensors)


def _view(array: mx.array) -> Tensor:
    name = _name(array)
    memory = memoryview(array)  # type: ignore[arg-type]
    if not memory.c_contiguous:
        array = mx.contiguous(array)
        mx.eval(array)
        memory = memoryview(array)  # type: ignore[arg-type]
    if not memory.nbytes:
        return Tensor(name, np.zeros(array.shape, _NUMPY[name]))
    return Tensor(name, np.frombuffer(memory, _NUMPY[name]).reshape(array.shape))


def _array(tensor: Tensor) -> mx.array:
    array = mx.array(tensor.data)
    return array.view(mx.bfloat16) if tensor.dtype == "BF16" else array


def _snapshot(start: int, stop: int, layers: Sequence[SavedLayer]) -> Snapshot:
    pieces: list[Piece | None] = []
    for layer in layers:
        arrays = [None if tensor is None else _array(tensor) for tensor in layer.tensors]
        if not arrays:
            pieces.append(None)
        elif layer.kind == ARRAYS:
            pieces.append(StatePiece(tuple(arrays)))
        else:
            keys, values = arrays
            assert keys is not None
            assert values is not None
            pieces.append(KVPiece(keys, values))
    snapshot = Snapshot(start, stop, tuple(pieces))
    mx.eval(snapshot.arrays)
    return snapshot


# The container: safetensors, parsed without trust.


class _Spec(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def as_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data_offsets": [self.begin, self.end],
        }

    def of(self, data: memoryview) -> Tensor:
        try:
            empty = np.zeros(self.shape, _NUMPY[self.dtype]) if not len(data) else None
            flat = np.frombuffer(data, _NUMPY[self.dtype]) if empty is None else empty
            # A foreign writer may put an array at an odd place.
            array = np.require(flat.reshape(self.shape), requirements="A")
        except ValueError as error:
            raise SavedStateError(f"a shape of {self.shape} is not possible") from error
        return Tensor(self.dtype, array)


class _Header(NamedTuple):
    metadata: dict[str, str]
    specs: dict[str, _Spec]
    offset: int
    nbytes: int

    def read(self, file: BinaryIO, name: str) -> Tensor | None:
        spec = self.specs.get(name)
        if spec is None:
            return None
        file.seek(self.offset + spec.begin)
        data = file.read(spec.end - spec.begin)
        _require(len(data) == spec.end - spec.begin, "it is truncated")
        return spec.of(memoryview(data))

    def read_all(self, file: BinaryIO) -> tuple[dict[str, Tensor], memoryview]:
        file.seek(self.offset)
        data = memoryview(file.read(self.nbytes))
        _require(len(data) == self.nbytes, "it is truncated")
        return {name: spec.of(data[spec.begin : spec.end]) for name, spec in self.specs.items()}, (
            data
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SavedStateError(message)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file, and turns whatever goes wrong with it into one line that names it."""
    try:
        with path.open("rb") as file:
            yield file
    except SavedStateError as error:
        raise SavedStateError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise SavedStateError(f"{path}: {error.strerror or error}") from error


def _read_header(file: BinaryIO) -> _Header:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    _require(2 <= length <= min(_MAX_HEADER, size - 8), "it is truncated or no safetensors file")
    try:
        entries = json.loads(file.read(length).decode(), object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise SavedStateError("its header is not JSON, or has a name twice") from error
    _require(isinstance(entries, dict), "its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    _require(
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()),
        "its metadata is not text",
    )
    nbytes = size - 8 - length
    specs = {name: _spec(name, entry, nbytes) for name, entry in entries.items()}
    end = 0
    for spec in sorted(specs.values(), key=lambda spec: (spec.begin, spec.end)):
        _require(spec.begin == end, "its tensors overlap or leave gaps")
        end = spec.end
    _require(end == nbytes, "it is truncated, or longer than its tensors")
    return _Header(metadata, specs, 8 + length, nbytes)


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def _spec(name: str, entry: Any, nbytes: int) -> _Spec:
    wrong = f"tensor {name[:40]!r} is not described properly"
    _require(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, wrong)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    _require(isinstance(dtype, str) and dtype in _NUMPY, f"tensor {name[:40]!r} has no known type")
    for numbers in (shape, offsets):
        _require(isinstance(numbers, list) and all(_natural(n) for n in numbers), wrong)
    _require(len(shape) <= _MAX_RANK and len(offsets) == 2, wrong)
    begin, end = offsets
    _require(begin <= end <= nbytes, f"tensor {name[:40]!r} reaches beyond the file")
    items = math.prod(shape) * np.dtype(_NUMPY[dtype]).itemsize
    _require(end - begin == items, f"tensor {name[:40]!r} has bytes for another shape")
    return _Spec(dtype, tuple(shape), begin, end)


def _natural(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 48


def _checksum(metadata: dict[str, str], specs: dict[str, _Spec], data: Sequence[memoryview]) -> str:
    """Of the tensors' bytes, and of all that says what they mean."""
    digest = hashlib.sha256(json.dumps([metadata, specs], sort_keys=True).encode())
    for buffer in data:
        digest.update(buffer)
    return digest.hexdigest()


def _integer(text: str | None, what: str) -> int:
    digits = text is not None and text.isascii() and text.isdecimal() and len(text) < 12
    _require(digits and int(text or 0) < _MAX_TOKENS, f"its {what} is not a number")
    return int(text or 0)


def _head(
    header: _Header, tokens: Tensor | None
) -> tuple[NodeHead, list[tuple[str, tuple[int, ...]]]]:
    """What the file is of, and its layers' kinds and meta."""
    metadata = header.metadata
    _require(metadata.get("format") == FORMAT, f"it is not of the format {FORMAT}")
    start, stop = (_integer(metadata.get(key), key) for key in ("start", "stop"))
    _require(start <= stop, f"it starts at {start} and stops at {stop}")
    _require(tokens is not None and tokens.dtype == "I32", "it has no int32 tokens")
    assert tokens is not None
    shape = tokens.data.shape
    _require(shape == (stop - start,), f"tokens {shape} are not those of [{start}, {stop})")
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
    _require(isinstance(entries, list), "its layers are not described")
    for entry in entries:
        _require(
            isinstance(entry, list)
            and len(entry) == 2
            and isinstance(entry[0], str)
            and isinstance(entry[1], list)
            and all(_natural(number) for number in entry[1]),
            "its layers are not described",
        )
        described.append((canonical(entry[0]), tuple(entry[1])))
    return described


# What a state must fulfil.


def canonical(kind: str) -> str:
    """The name behind an alias, if it is of a kind that can be read.

    Raises:
        SavedStateError: it is not, or nobody knows it.
    """
    name = ALIASES.get(kind, kind)
    if name not in KNOWN:
        known = ", ".join((*KNOWN, *ALIASES))
        raise SavedStateError(f"cache kind {kind[:40]!r} is unknown (known: {known})")
    if name not in (*SUPPORTED, NESTED):
        raise SavedStateError(
            f"cache kind {kind} is not supported yet (supported: {', '.join(SUPPORTED)})"
        )
    return name


def _check_layers(
    layers: Sequence[SavedLayer], start: int, stop: int, template: Template | None
) -> None:
    if template is not None:
        _require(
            len(layers) == len(template), f"{len(layers)} layers, but the model has {len(template)}"
        )
    for i, layer in enumerate(layers):
        try:
            for tensor in layer.tensors:
                if tensor is not None:
                    _require(tensor.dtype in _MLX, f"a state cannot be of {tensor.dtype}")
            _CHECKS.get(layer.kind, _check_nested)(layer, start, stop)
            if template is not None:
                _check_template(layer, template[i])
        except SavedStateError as error:
            raise SavedStateError(f"layer {i}: {error}") from error


def _check_nested(layer: SavedLayer, start: int, stop: int) -> None:
    raise SavedStateError(f"a {layer.kind} is not a layer")


def _check_full(layer: SavedLayer, start: int, stop: int) -> None:
    _require(not layer.meta, f"{FULL} has meta {layer.meta}, but has none")
    held = _check_kv(layer)
    _require(held == stop - start, f"{FULL} has {held} tokens of [{start}, {stop})")


def _check_rotating(layer: SavedLayer, start: int, stop: int) -> None:
    _require(len(layer.meta) == 4, f"{ROTATING} needs 4 meta values, not {len(layer.meta)}")
    keep, max_size, offset, cursor = layer.meta
    _require(keep == 0, f"{ROTATING} with {keep} tokens kept for good is not supported")
    _require(max_size >= 1, f"{ROTATING} has a max_size of {max_size}")
    held = _check_kv(layer)
    if not layer.tensors:
        _require(offset == cursor == 0, f"{ROTATING} is empty, but at {offset}, cursor {cursor}")
        return
    _require(offset == stop, f"{ROTATING} is at {offset}, but the tokens end at {stop}")
    _require(held <= offset, f"{ROTATING} has {held} tokens at offset {offset}")
    _require(held <= stop - start, f"{ROTATING} has {held} tokens of [{start}, {stop})")
    _require(cursor == held, f"{ROTATING} has its cursor at {cursor} of {held}")


def _check_kv(layer: SavedLayer) -> int:
    """The tokens of both tensors, or 0 without any."""
    if not layer.tensors:
        return 0
    _require(len(layer.tensors) == 2 and None not in layer.tensors, "keys or values are missing")
    keys, values = (tensor.data.shape for tensor in layer.tensors if tensor is not None)
    fits = len(keys) == len(values) == 4 and keys[2] == values[2] and keys[0] == values[0]
    _require(fits and keys[0] == 1, f"keys {keys}, values {values}: not [1, heads, tokens, dim]")
    # A dim may be 0: some models keep keys only.
    _require(all(keys[:3]) and all(values[:3]), f"keys {keys}, values {values}: an empty axis")
    return int(keys[2])


def _check_arrays(layer: SavedLayer, start: int, stop: int) -> None:
    held = [tensor for tensor in layer.tensors if tensor is not None]
    _require(layer.meta in ((), (len(layer.tensors),)), f"{ARRAYS} has meta {layer.meta}")
    _require(bool(held) == bool(layer.meta), f"{ARRAYS} has no state, but slots")
    for tensor in held:
        shape = tensor.data.shape
        _require(shape[:1] == (1,) and bool(tensor.data.size), f"a state of shape {shape}")


_CHECKS = {FULL: _check_full, ROTATING: _check_rotating, ARRAYS: _check_arrays}


def _check_template(layer: SavedLayer, template: LayerTemplate) -> None:
    kind, specs = template
    window = layer.meta[1] if layer.kind == ROTATING else None
    _require(
        LayerKind(window, layer.kind == ARRAYS) == kind,
        f"{layer.kind} of window {window}, but the model wants {kind}",
    )
    if specs is None or not layer.tensors:
        return
    _require(len(layer.tensors) == len(specs), f"{len(layer.tensors)} arrays, not {len(specs)}")
    for tensor, spec in zip(layer.tensors, specs, strict=True):
        if tensor is None or spec is None:
            continue
        shape = tensor.data.shape
        same = len(shape) == len(spec.shape) and all(
            want in (None, have) for have, want in zip(shape, spec.shape, strict=True)
        )
        _require(same, f"shape {shape}, but the model's is {spec.shape}")
        _require(tensor.dtype == spec.dtype, f"{tensor.dtype}, but the model's is {spec.dtype}")


# mlx-lm's prompt-cache files.


class _PromptFile:
    """Trees whose leaves are named by their paths: "3.0" is the first part of the fourth cache.

    Metadata is a list of three: today the user's, the caches' classes, and the paths of tensors
    that stand for scalars; in files of older versions the caches' meta, the user's, the classes.
    """

    def __init__(self, metadata: dict[str, str], tensors: dict[str, Tensor]) -> None:
        self._metadata = metadata
        self._tensors = tensors
        self._old = metadata.get("2.0", "") != ""
        self._classes = _listed(metadata, "2" if self._old else "1")
        self._none = {
            path
            for i, path in ((i, metadata.get(f"2.{i}.0")) for i in range(1, len(metadata) + 1))
            if not self._old and path is not None and metadata.get(f"2.{i}.1") == "none"
        }

    def layers(self) -> Iterator[SavedLayer]:
        """All layers, in temporal order."""
        for i, name in enumerate(self._classes):
            try:
                yield from self._layer(str(i), name)
            except SavedStateError as error:
                raise SavedStateError(f"cache {i}: {error}") from error

    def _layer(self, path: str, name: str, depth: int = 0) -> Iterator[SavedLayer]:
        kind = canonical(name)
        if kind == NESTED:
            _require(not self._old and depth < _MAX_RANK, f"{NESTED} of an old file or too deep")
            inner = 0
            while f"{path}.{inner}.1" in self._tensors:
                text = self._tensors[f"{path}.{inner}.1"].data
                name = "".join(map(chr, text.clip(0, 127).reshape(-1)[:80].tolist()))
                yield from self._layer(f"{path}.{inner}.0", name, depth + 1)
                inner += 1
        elif kind == ARRAYS:
            yield self._arrays(path)
        else:
            yield self._attention(path, kind)

    def _arrays(self, path: str) -> SavedLayer:
        if not self._old:
            for part, what in (("1", "left padding"), ("2", "lengths")):
                _require(self._get(f"{path}.{part}") is None, f"{ARRAYS} with {what}")
            path += ".0"
        slots: list[Tensor | None] = []
        while f"{path}.{len(slots)}" in self._tensors:
            slots.append(self._get(f"{path}.{len(slots)}"))
        if not any(slot is not None for slot in slots):
            slots = []
        return SavedLayer(ARRAYS, (len(slots),) if slots else (), tuple(slots))

    def _attention(self, path: str, kind: str) -> SavedLayer:
        tensors = tuple(t for part in "01" if (t := self._get(f"{path}.{part}")) is not None)
        held = _check_kv(SavedLayer(kind, (), tensors))
        meta = self._meta(path)
        if kind == FULL:
            _require(len(meta) <= 1, f"{FULL} has {len(meta)} meta values")
            offset = meta[0] if meta else held
            _require(offset <= held, f"{FULL} is at offset {offset} of {held}")
            return SavedLayer(FULL, (), _ordered(tensors, 0, offset))
        _require(len(meta) == 4, f"{ROTATING} needs 4 meta values, not {len(meta)}")
        offset, keep, max_size, cursor = (meta[2], meta[0], meta[1], meta[3]) if self._old else meta
        _require(cursor <= held, f"{ROTATING} has its cursor at {cursor} of {held}")
        _require(bool(held or not offset), f"{ROTATING} is empty, but at {offset}")
        if held > offset:  # it has room yet
            _require(cursor == offset, f"{ROTATING} is at {offset}, but its cursor at {cursor}")
            tensors = _ordered(tensors, 0, offset)
        elif cursor < held:  # it has wrapped
            whole = held == max_size
            _require(whole, f"{ROTATING} wraps at {held}, but has a max_size of {max_size}")
            tensors = _ordered(tensors, cursor, held)
        layer = SavedLayer(ROTATING, (), tensors)
        enough = layer.tokens >= min(offset, max_size - 1)
        _require(enough, f"{ROTATING} has {layer.tokens} of the {max_size} tokens up to {offset}")
        return SavedLayer(ROTATING, (keep, max_size, offset, layer.tokens), tensors)

    def _meta(self, path: str) -> tuple[int, ...]:
        if self._old:
            return tuple(_integer(text, "meta") for text in _listed(self._metadata, f"0.{path}"))
        numbers: list[int] = []
        while (tensor := self._tensors.get(f"{path}.{len(numbers) + 2}")) is not None:
            whole = tensor.dtype in ("I32", "U32", "I64") and tensor.data.size == 1
            number = int(tensor.data.reshape(-1)[0]) if whole else -1
            _require(0 <= number < _MAX_TOKENS, f"its meta {path}.{len(numbers) + 2} is no number")
            numbers.append(number)
        return tuple(numbers)

    def _get(self, path: str) -> Tensor | None:
        return None if path in self._none else self._tensors.get(path)


def _listed(metadata: dict[str, str], path: str) -> list[str]:
    values: list[str] = []
    while (value := metadata.get(f"{path}.{len(values)}")) is not None:
        values.append(value)
    return values


def _ordered(tensors: Sequence[Tensor], first: int, count: int) -> tuple[Tensor, ...]:
    """``count`` tokens from ``first`` on, round the ring; none are no tensors."""
    if not count:
        return ()
    return tuple(Tensor(t.dtype, np.roll(t.data, -first, 2)[:, :, :count]) for t in tensors)
