"""Layers of a snapshot outside MLX: conversion to plain memory and back, and validation.

Kinds have mlx-lm's names. Only ``pack`` and ``unpack`` touch MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.cache.saved.safetensors import NUMPY, SavedStateError, Tensor, require
from chairlift.cache.snapshot import KVPiece, LayerKind, LayerState, Snapshot, StatePiece

FULL, ROTATING, CHUNKED = "KVCache", "RotatingKVCache", "ChunkedKVCache"
ARRAYS, NESTED = "ArraysCache", "CacheList"
SUPPORTED = (FULL, ROTATING, CHUNKED, ARRAYS)
KNOWN = (*SUPPORTED, NESTED, "QuantizedKVCache", "BatchKVCache", "BatchRotatingKVCache")
ALIASES = {
    "ConcatenateKVCache": FULL,
    "KVCacheSimple": FULL,
    "StandardKvCache": FULL,
    "RotatingKvCache": ROTATING,
    "MambaCache": ARRAYS,
    "StandardQuantizedKvCache": "QuantizedKVCache",
}
_MLX = {
    **{"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32},
    **{"U32": mx.uint32, "I32": mx.int32, "I64": mx.int64},
}


class SavedLayer(NamedTuple):
    """A layer as mlx-lm's files describe it.

    Attributes:
        kind: the name of mlx-lm's cache class.
        meta: depends on the kind. ``RotatingKVCache``: ``(keep, max_size, offset, cursor)``;
            ``ChunkedKVCache``: ``(offset, chunk_size, start_position)``; ``ArraysCache``: the
            number of slots, or nothing without a state; ``KVCache``: nothing.
        tensors: keys and values, or the slots of a state; empty if nothing is cached.
    """

    kind: str
    meta: tuple[int, ...] = ()
    tensors: tuple[Tensor | None, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of an attention layer's tensors."""
        first = self.tensors[0] if self.tensors else None
        return int(first.data.shape[2]) if first is not None else 0

    @property
    def offset(self) -> int:
        """The position behind an attention layer's last token."""
        if self.kind == CHUNKED:
            return self.meta[0]
        return self.meta[2] if self.kind == ROTATING else self.tokens

    @property
    def window(self) -> int | None:
        """The tokens of the layer's window or chunk; None for other kinds."""
        return self.meta[1] if self.kind in (ROTATING, CHUNKED) else None


class ArraySpec(NamedTuple):
    """An array's safetensors type and shape; the axis of tokens is None."""

    dtype: str
    shape: tuple[int | None, ...]


class LayerTemplate(NamedTuple):
    """The required type and shape of a model's layer; ``arrays`` is None while unknown."""

    kind: LayerKind
    arrays: tuple[ArraySpec | None, ...] | None = None


Template = Sequence[LayerTemplate]


def template_of(kinds: Sequence[LayerKind], snapshot: Snapshot) -> list[LayerTemplate]:
    """The types and shapes of a model's snapshots, taken from one of them."""
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
    """Converts a snapshot to views of its memory, which keep the MLX arrays alive; evaluates it.

    Raises:
        SavedStateError: the snapshot has a kind of layer or a type that files cannot store.
    """
    snapshot = snapshot.loaded()
    mx.eval(snapshot.arrays)
    pieces = zip(kinds, snapshot.layers, strict=True)
    return tuple(_packed(kind, piece, snapshot.stop) for kind, piece in pieces)


def _packed(kind: LayerKind, piece: LayerState | None, stop: int) -> SavedLayer:
    if kind.recurrent:
        slots = piece.slots if isinstance(piece, StatePiece) else ()
        count = (len(slots),) if slots else ()
        return SavedLayer(ARRAYS, count, tuple(None if s is None else _view(s) for s in slots))
    if piece is not None and not isinstance(piece, KVPiece):
        raise SavedStateError(f"a {type(piece).__name__} cannot be saved")
    tensors = tuple(_view(array) for array in piece.arrays) if piece else ()
    if kind.window is None:
        return SavedLayer(FULL, (), tensors)
    if kind.chunked:
        offset, first = (stop, stop - piece.tokens) if piece else (0, 0)
        return SavedLayer(CHUNKED, (offset, kind.window, first), tensors)
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
        return Tensor(name, np.zeros(array.shape, NUMPY[name]))
    return Tensor(name, np.frombuffer(memory, NUMPY[name]).reshape(array.shape))


def _name(array: mx.array) -> str:
    for name, dtype in _MLX.items():
        if dtype == array.dtype:
            return name
    raise SavedStateError(f"an array of {array.dtype} cannot be saved")


def detached(layers: Sequence[SavedLayer]) -> tuple[SavedLayer, ...]:
    """Copies the layers into NumPy's memory, so that they keep no MLX array alive."""
    return tuple(
        layer._replace(
            tensors=tuple(t if t is None else t._replace(data=t.data.copy()) for t in layer.tensors)
        )
        for layer in layers
    )


def unpack(start: int, stop: int, layers: Sequence[SavedLayer]) -> Snapshot:
    """Converts layers to an evaluated snapshot of ``[start, stop)`` with arrays of its own."""
    pieces: list[LayerState | None] = []
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


def _array(tensor: Tensor) -> mx.array:
    array = mx.array(tensor.data)
    return array.view(mx.bfloat16) if tensor.dtype == "BF16" else array


def canonical(kind: str) -> str:
    """Resolves aliases of a kind's name.

    Raises:
        SavedStateError: the kind is unknown, or not supported.
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


def check_layers(
    layers: Sequence[SavedLayer], start: int, stop: int, template: Template | None
) -> None:
    """Validates layers that cover tokens ``[start, stop)``, against a template if there is one.

    Raises:
        SavedStateError: a layer is inconsistent, or does not fit the template.
    """
    if template is not None:
        require(
            len(layers) == len(template), f"{len(layers)} layers, but the model has {len(template)}"
        )
    for i, layer in enumerate(layers):
        try:
            for tensor in layer.tensors:
                if tensor is not None:
                    require(tensor.dtype in _MLX, f"a state cannot be of {tensor.dtype}")
            _CHECKS.get(layer.kind, _check_nested)(layer, start, stop)
            if template is not None:
                _check_template(layer, template[i])
        except SavedStateError as error:
            raise SavedStateError(f"layer {i}: {error}") from error


def _check_nested(layer: SavedLayer, start: int, stop: int) -> None:
    raise SavedStateError(f"a {layer.kind} is not a layer")


def _check_full(layer: SavedLayer, start: int, stop: int) -> None:
    require(not layer.meta, f"{FULL} has meta {layer.meta}, but has none")
    tokens = check_kv(layer)
    require(tokens == stop - start, f"{FULL} has {tokens} tokens of [{start}, {stop})")


def _check_rotating(layer: SavedLayer, start: int, stop: int) -> None:
    require(len(layer.meta) == 4, f"{ROTATING} needs 4 meta values, not {len(layer.meta)}")
    keep, max_size, offset, cursor = layer.meta
    require(keep == 0, f"{ROTATING} with {keep} tokens kept for good is not supported")
    require(max_size >= 1, f"{ROTATING} has a max_size of {max_size}")
    tokens = check_kv(layer)
    if not layer.tensors:
        require(offset == cursor == 0, f"{ROTATING} is empty, but at {offset}, cursor {cursor}")
        return
    require(offset == stop, f"{ROTATING} is at {offset}, but the tokens end at {stop}")
    require(tokens <= offset, f"{ROTATING} has {tokens} tokens at offset {offset}")
    require(tokens <= stop - start, f"{ROTATING} has {tokens} tokens of [{start}, {stop})")
    require(cursor == tokens, f"{ROTATING} has its cursor at {cursor} of {tokens}")


def _check_chunked(layer: SavedLayer, start: int, stop: int) -> None:
    require(len(layer.meta) == 3, f"{CHUNKED} needs 3 meta values, not {len(layer.meta)}")
    offset, chunk, first = layer.meta
    require(chunk >= 1, f"{CHUNKED} has chunks of {chunk}")
    tokens = check_kv(layer)
    require(offset - first == tokens, f"{CHUNKED} has {tokens} tokens of [{first}, {offset})")
    if layer.tensors:
        require(offset == stop, f"{CHUNKED} is at {offset}, but the tokens end at {stop}")
        require(start <= first, f"{CHUNKED} begins at {first}, but the tokens at {start}")
    else:
        require(offset == 0, f"{CHUNKED} is empty, but at {offset}")


def check_kv(layer: SavedLayer) -> int:
    """Validates an attention layer's tensors; returns their tokens, 0 without tensors."""
    if not layer.tensors:
        return 0
    require(len(layer.tensors) == 2 and None not in layer.tensors, "keys or values are missing")
    keys, values = (tensor.data.shape for tensor in layer.tensors if tensor is not None)
    fits = len(keys) == len(values) == 4 and keys[2] == values[2] and keys[0] == values[0]
    require(fits and keys[0] == 1, f"keys {keys}, values {values}: not [1, heads, tokens, dim]")
    # A dim may be 0: some models keep keys only. A layer that was never written has no heads.
    written = bool(keys[1]) == bool(values[1]) and keys[2] > 0
    require(written, f"keys {keys}, values {values}: an empty axis")
    return int(keys[2])


def _check_arrays(layer: SavedLayer, start: int, stop: int) -> None:
    states = [tensor for tensor in layer.tensors if tensor is not None]
    require(layer.meta in ((), (len(layer.tensors),)), f"{ARRAYS} has meta {layer.meta}")
    require(bool(states) == bool(layer.meta), f"{ARRAYS} has no state, but slots")
    for tensor in states:
        shape = tensor.data.shape
        require(shape[:1] == (1,) and bool(tensor.data.size), f"a state of shape {shape}")


_CHECKS = {
    FULL: _check_full,
    ROTATING: _check_rotating,
    CHUNKED: _check_chunked,
    ARRAYS: _check_arrays,
}


def _check_template(layer: SavedLayer, template: LayerTemplate) -> None:
    kind, specs = template
    require(
        LayerKind(layer.window, layer.kind == ARRAYS, chunked=layer.kind == CHUNKED) == kind,
        f"{layer.kind} of window {layer.window}, but the model wants {kind}",
    )
    if specs is None or not layer.tensors:
        return
    require(len(layer.tensors) == len(specs), f"{len(layer.tensors)} arrays, not {len(specs)}")
    for tensor, spec in zip(layer.tensors, specs, strict=True):
        if tensor is None or spec is None:
            continue
        shape = tensor.data.shape
        same = len(shape) == len(spec.shape) and all(
            expected in (None, size) for size, expected in zip(shape, spec.shape, strict=True)
        )
        require(same, f"shape {shape}, but the model's is {spec.shape}")
        require(tensor.dtype == spec.dtype, f"{tensor.dtype}, but the model's is {spec.dtype}")
