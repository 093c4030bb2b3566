"""Reads prompt caches that mlx-lm has saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from chairlift.cache.saved.layers import (
    ARRAYS,
    CHUNKED,
    FULL,
    NESTED,
    ROTATING,
    SavedLayer,
    Template,
    canonical,
    check_kv,
    check_layers,
    unpack,
)
from chairlift.cache.saved.safetensors import (
    MAX_RANK,
    MAX_TOKENS,
    SavedStateError,
    Tensor,
    integer,
    opened,
    read_header,
    require,
)
from chairlift.cache.snapshot import Snapshot


def read_prompt_cache(
    path: Path, tokens: int | None = None, template: Template | None = None
) -> Snapshot:
    """Reads a file of mlx-lm's ``save_prompt_cache`` as a snapshot of ``[0, tokens)``; uses MLX.

    Args:
        path: the file.
        tokens: the required number of tokens. Only needed if all layers are recurrent, because
            their caches do not contain the number.
        template: the required types and shapes of the layers; the layers inside a CacheList count
            one by one.

    Raises:
        SavedStateError: the file cannot be read, is inconsistent, or has an unsupported kind of
            cache.
    """
    with opened(path) as file:
        header = read_header(file)
        layers = list(_PromptFile(header.metadata, header.read_all(file)[0]).layers())
        require(bool(layers), "it has no caches")
        offsets = {layer.offset for layer in layers if layer.kind != ARRAYS}
        offsets |= set() if tokens is None else {tokens}
        require(bool(offsets), "its caches are all recurrent and do not tell of how many tokens")
        require(len(offsets) == 1, f"the offsets differ: {sorted(offsets)} tokens")
        (stop,) = offsets
        check_layers(layers, 0, stop, template)
        return unpack(0, stop, layers)


class _PromptFile:
    """The contents of a file. Paths name the leaves of trees: "3.0" is part 0 of the fourth cache.

    The metadata has three parts. Today: the user's metadata, the caches' classes, and the paths of
    tensors that stand for scalars. In files of older versions: the caches' meta, the user's
    metadata, the classes.
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
            require(not self._old and depth < MAX_RANK, f"{NESTED} of an old file or too deep")
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
                require(self._get(f"{path}.{part}") is None, f"{ARRAYS} with {what}")
            path += ".0"
        slots: list[Tensor | None] = []
        while f"{path}.{len(slots)}" in self._tensors:
            slots.append(self._get(f"{path}.{len(slots)}"))
        if not any(slot is not None for slot in slots):
            slots = []
        return SavedLayer(ARRAYS, (len(slots),) if slots else (), tuple(slots))

    def _attention(self, path: str, kind: str) -> SavedLayer:
        tensors = tuple(t for part in "01" if (t := self._get(f"{path}.{part}")) is not None)
        size = check_kv(SavedLayer(kind, (), tensors))
        meta = self._meta(path)
        if kind == FULL:
            require(len(meta) <= 1, f"{FULL} has {len(meta)} meta values")
            offset = meta[0] if meta else size
            require(offset <= size, f"{FULL} is at offset {offset} of {size}")
            return SavedLayer(FULL, (), _ordered(tensors, 0, offset))
        if kind == CHUNKED:
            require(len(meta) == 3, f"{CHUNKED} needs 3 meta values, not {len(meta)}")
            offset, chunk, first = meta
            require(0 <= offset - first <= size, f"{CHUNKED} has {size} of [{first}, {offset})")
            enough = offset - first >= min(offset, chunk - 1)
            require(enough, f"{CHUNKED} has [{first}, {offset}), but chunks of {chunk}")
            return SavedLayer(CHUNKED, meta, _ordered(tensors, 0, offset - first))
        require(len(meta) == 4, f"{ROTATING} needs 4 meta values, not {len(meta)}")
        offset, keep, max_size, cursor = (meta[2], meta[0], meta[1], meta[3]) if self._old else meta
        require(cursor <= size, f"{ROTATING} has its cursor at {cursor} of {size}")
        require(bool(size or not offset), f"{ROTATING} is empty, but at {offset}")
        if size > offset:  # not full yet
            require(cursor == offset, f"{ROTATING} is at {offset}, but its cursor at {cursor}")
            tensors = _ordered(tensors, 0, offset)
        elif cursor < size:  # it has wrapped
            full = size == max_size
            require(full, f"{ROTATING} wraps at {size}, but has a max_size of {max_size}")
            tensors = _ordered(tensors, cursor, size)
        layer = SavedLayer(ROTATING, (), tensors)
        enough = layer.tokens >= min(offset, max_size - 1)
        require(enough, f"{ROTATING} has {layer.tokens} of the {max_size} tokens up to {offset}")
        return SavedLayer(ROTATING, (keep, max_size, offset, layer.tokens), tensors)

    def _meta(self, path: str) -> tuple[int, ...]:
        if self._old:
            return tuple(integer(text, "meta") for text in _listed(self._metadata, f"0.{path}"))
        numbers: list[int] = []
        while (tensor := self._tensors.get(f"{path}.{len(numbers) + 2}")) is not None:
            is_integer = tensor.dtype in ("I32", "U32", "I64") and tensor.data.size == 1
            number = int(tensor.data.reshape(-1)[0]) if is_integer else -1
            require(0 <= number < MAX_TOKENS, f"its meta {path}.{len(numbers) + 2} is no number")
            numbers.append(number)
        return tuple(numbers)

    def _get(self, path: str) -> Tensor | None:
        return None if path in self._none else self._tensors.get(path)


def _listed(metadata: dict[str, str], path: str) -> list[str]:
    """The values of ``path.0``, ``path.1`` and so on."""
    values: list[str] = []
    while (value := metadata.get(f"{path}.{len(values)}")) is not None:
        values.append(value)
    return values


def _ordered(tensors: Sequence[Tensor], first: int, count: int) -> tuple[Tensor, ...]:
    """``count`` tokens of each tensor from ``first`` on, wrapping round; ``()`` if 0 tokens."""
    if not count:
        return ()
    return tuple(Tensor(t.dtype, np.roll(t.data, -first, 2)[:, :, :count]) for t in tensors)
