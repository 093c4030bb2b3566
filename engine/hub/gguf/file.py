"""Reads the structure of a GGUF file: its metadata, and the position of each tensor's bytes.

The ``gguf`` package's reader makes an array object per metadata element. It takes 8 s for Gemma's
vocabulary, this module 0.3 s; and at a truncated file it raises an error about array shapes. Only
the package's type tables and its dequantization are used.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from chairlift.engine.errors import ModelError, UnsupportedModel
from chairlift.engine.hub.folder_check import damaged_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS: dict[int, tuple[str, int]] = {
    GGUFValueType.UINT8: ("<u1", 1),
    GGUFValueType.INT8: ("<i1", 1),
    GGUFValueType.UINT16: ("<u2", 2),
    GGUFValueType.INT16: ("<i2", 2),
    GGUFValueType.UINT32: ("<u4", 4),
    GGUFValueType.INT32: ("<i4", 4),
    GGUFValueType.FLOAT32: ("<f4", 4),
    GGUFValueType.BOOL: ("?", 1),
    GGUFValueType.UINT64: ("<u8", 8),
    GGUFValueType.INT64: ("<i8", 8),
    GGUFValueType.FLOAT64: ("<f8", 8),
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor's place in the file.

    Attributes:
        shape: in elements, outermost dimension first.
        start: the position of its first byte in the file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    n_bytes: int


class GGUFFile:
    """A complete GGUF file: every listed tensor is inside it.

    Attributes:
        metadata: Python values by key; arrays are lists.
        tensors: by name.

    Raises:
        ModelError: the file cannot be read, is truncated or is not a GGUF file.
        UnsupportedModel: it is a part of a model, or its version, byte order or a tensor's type is
            not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():
                raise ModelError(f"{path}: cannot be read: it is no file")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            cause = "the file is empty" if isinstance(error, ValueError) else str(error)
            raise ModelError(f"{path}: cannot be read: {cause}") from error
        cursor = _Cursor(self._map, path)
        tensor_count, key_count = self._read_preamble(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.integer("<I"))
        if (parts := self.get("split.count", int, 1)) > 1:
            raise UnsupportedModel(
                f"{path}: it is one of the {parts} parts of a model; join them: "
                "llama-gguf-split --merge FIRST-PART NEW.gguf"
            )
        infos = [self._read_tensor_info(cursor) for _ in range(tensor_count)]
        alignment = self.get("general.alignment", int, _DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1):
            raise ModelError(f"{path}: general.alignment {alignment} is not a power of two")
        self._header_bytes = cursor.position
        data = -(-cursor.position // alignment) * alignment
        self.tensors = {info[0]: self._place(data, *info) for info in infos}

    def _read_preamble(self, cursor: _Cursor) -> tuple[int, int]:
        if cursor.take(4) != _MAGIC:
            raise damaged_file(self.path, "not a GGUF file (it does not begin with 'GGUF')")
        version = cursor.integer("<I")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            what = "a big-endian file" if swapped else f"version {version}"
            raise UnsupportedModel(f"{self.path}: GGUF {what} is not supported")
        tensor_count, key_count = cursor.integer("<Q"), cursor.integer("<Q")
        return tensor_count, key_count

    def _read_tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        dimensions = cursor.integer("<I")
        if dimensions > _MAX_DIMENSIONS:
            raise ModelError(f"{self.path}: damaged: tensor {name} has {dimensions} dimensions")
        # GGUF lists the innermost dimension first.
        shape = tuple(reversed([cursor.integer("<Q") for _ in range(dimensions)]))
        return name, shape, cursor.integer("<I"), cursor.integer("<Q")

    def _place(
        self, data: int, name: str, shape: tuple[int, ...], raw_type: int, offset: int
    ) -> GGUFTensor:
        try:
            type_ = GGMLQuantizationType(raw_type)
        except ValueError:
            raise UnsupportedModel(
                f"{self.path}: tensor {name} has type {raw_type}, which is not supported"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[type_]
        if not shape or shape[-1] % block:
            raise ModelError(f"{self.path}: damaged: tensor {name} of {type_.name} is {shape}")
        elements = 1
        for size in shape:
            elements *= size
        tensor = GGUFTensor(name, type_, shape, data + offset, elements // block * block_bytes)
        end = tensor.start + tensor.n_bytes
        if end > len(self._map):
            raise ModelError(
                f"{self.path}: truncated: tensor {name} ends at byte {end}, "
                f"the file at {len(self._map)}"
            )
        return tensor

    @cached_property
    def header_sha256(self) -> str:
        """The SHA-256 of everything before the tensors' bytes: metadata, tokenizer and shapes."""
        return hashlib.sha256(memoryview(self._map)[: self._header_bytes]).hexdigest()

    def raw(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, ``[rows, bytes of one row]``, as a view of the mapped file."""
        flat = np.frombuffer(self._map, np.uint8, tensor.n_bytes, tensor.start)
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        return flat.reshape(-1, tensor.shape[-1] // block * block_bytes)

    def get(self, key: str, kind: type[T], default: T) -> T:
        """The metadata value of a key, or ``default`` if the key is missing.

        Raises:
            ModelError: the value has another type than ``kind``. An int is accepted for a float.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return kind(value)  # type: ignore[call-arg]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path}: metadata key {key} is not of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """As ``get``, but raises ModelError if the key is missing."""
        if key not in self.metadata:
            raise ModelError(f"{self.path}: metadata key {key} is missing")
        return self.get(key, kind, kind())


class _Cursor:
    """Reads GGUF's primitive values one after another; raises ModelError at the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path = data, path
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise self._runs_past_end()
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def _runs_past_end(self) -> ModelError:
        return ModelError(
            f"{self._path}: truncated or damaged: its header runs past its end, "
            f"byte {len(self._data)}"
        )

    def integer(self, code: str) -> int:
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Reads strings, each after its length; in one loop, since a vocabulary has very many."""
        data, size, end = self._data, len(self._data), self.position
        strings = []
        try:
            for _ in range(count):
                start = end + 8
                end = start + int.from_bytes(data[end:start], "little")
                if end > size:
                    raise self._runs_past_end()
                strings.append(data[start:end].decode())
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path}: damaged: invalid UTF-8 at byte {start}") from error
        self.position = end
        return strings

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0]
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            raise ModelError(
                f"{self._path}: damaged: value of unknown type {kind} at byte {self.position}"
            )
        element, count = self.integer("<I"), self.integer("<Q")
        if element in _SCALARS:
            return self._scalars(element, count)
        if element == GGUFValueType.STRING:
            return self._strings(count)
        raise UnsupportedModel(f"{self._path}: metadata array of type {element} is not supported")

    def _scalars(self, kind: int, count: int) -> list[Any]:
        dtype, size = _SCALARS[kind]
        values: list[Any] = np.frombuffer(self.take(count * size), dtype).tolist()
        return values
