"""Reads untrusted safetensors files: checks every number of a header before it is used.

Arrays are plain memory, for any thread. This module does not use MLX.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

# NumPy's type for each of safetensors' types; bfloat16 is read as uint16, which keeps its bits.
NUMPY = {
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4"},
    **{"I32": "<i4", "U64": "<u8", "I64": "<i8", "F64": "<f8"},
    **{"BF16": "<u2", "F16": "<f2", "F32": "<f4"},
}
_MAX_HEADER = 64 << 20
MAX_RANK = 8
MAX_TOKENS = 1 << 31
Array = npt.NDArray[Any]


class SavedStateError(Exception):
    """A file cannot be used; the text is one line. An OSError, if there was one, is the cause."""


class Tensor(NamedTuple):
    """An array's memory and its safetensors type; bfloat16 as uint16."""

    dtype: str
    data: Array


class Spec(NamedTuple):
    """A header's entry for one tensor: its bytes are ``[begin, end)`` of the file's data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def as_json(self) -> dict[str, Any]:
        """The entry in safetensors' form."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "data_offsets": [self.begin, self.end],
        }

    def tensor(self, data: memoryview) -> Tensor:
        """Makes the tensor from its bytes. Raises SavedStateError if the shape is impossible."""
        try:
            empty = np.zeros(self.shape, NUMPY[self.dtype]) if not len(data) else None
            flat = np.frombuffer(data, NUMPY[self.dtype]) if empty is None else empty
            # Another program may have written the array without alignment.
            array = np.require(flat.reshape(self.shape), requirements="A")
        except ValueError as error:
            raise SavedStateError(f"a shape of {self.shape} is not possible") from error
        return Tensor(self.dtype, array)


class Header(NamedTuple):
    """A checked header; the file's data are ``nbytes`` bytes from ``offset`` on."""

    metadata: dict[str, str]
    specs: dict[str, Spec]
    offset: int
    nbytes: int

    def read(self, file: BinaryIO, name: str) -> Tensor | None:
        """Reads one tensor; None if there is none of that name. Raises SavedStateError."""
        spec = self.specs.get(name)
        if spec is None:
            return None
        file.seek(self.offset + spec.begin)
        data = file.read(spec.end - spec.begin)
        require(len(data) == spec.end - spec.begin, "it is truncated")
        return spec.tensor(memoryview(data))

    def read_all(self, file: BinaryIO) -> tuple[dict[str, Tensor], memoryview]:
        """Reads all tensors; returns them and their bytes. Raises SavedStateError."""
        file.seek(self.offset)
        data = memoryview(file.read(self.nbytes))
        require(len(data) == self.nbytes, "it is truncated")
        return {
            name: spec.tensor(data[spec.begin : spec.end]) for name, spec in self.specs.items()
        }, (data)


def require(condition: bool, message: str) -> None:
    """Raises SavedStateError if a condition on a file does not hold."""
    if not condition:
        raise SavedStateError(message)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file; turns every error with it into a SavedStateError of one line with its path."""
    try:
        with path.open("rb") as file:
            yield file
    except SavedStateError as error:
        raise SavedStateError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise SavedStateError(f"{path}: {error.strerror or error}") from error


def read_header(file: BinaryIO) -> Header:
    """Reads and checks the header of a file at its beginning. Raises SavedStateError."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    require(2 <= length <= min(_MAX_HEADER, size - 8), "it is truncated or no safetensors file")
    try:
        entries = json.loads(file.read(length).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise SavedStateError("its header is not JSON, or has a name twice") from error
    require(isinstance(entries, dict), "its header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    require(
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()),
        "its metadata is not text",
    )
    nbytes = size - 8 - length
    specs = {name: _spec(name, entry, nbytes) for name, entry in entries.items()}
    end = 0
    for spec in sorted(specs.values(), key=lambda spec: (spec.begin, spec.end)):
        require(spec.begin == end, "its tensors overlap or leave gaps")
        end = spec.end
    require(end == nbytes, "it is truncated, or longer than its tensors")
    return Header(metadata, specs, 8 + length, nbytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dictionary. Raises ValueError if a name occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name twice")
    return found


def _spec(name: str, entry: Any, nbytes: int) -> Spec:
    wrong = f"tensor {name[:40]!r} is not described properly"
    require(isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}, wrong)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    require(isinstance(dtype, str) and dtype in NUMPY, f"tensor {name[:40]!r} has no known type")
    for numbers in (shape, offsets):
        require(isinstance(numbers, list) and all(natural(n) for n in numbers), wrong)
    require(len(shape) <= MAX_RANK and len(offsets) == 2, wrong)
    begin, end = offsets
    require(begin <= end <= nbytes, f"tensor {name[:40]!r} reaches beyond the file")
    items = math.prod(shape) * np.dtype(NUMPY[dtype]).itemsize
    require(end - begin == items, f"tensor {name[:40]!r} has bytes for another shape")
    return Spec(dtype, tuple(shape), begin, end)


def natural(number: Any) -> bool:
    """Whether a JSON value is a size or an offset: an integer from 0 to below 2**48."""
    return type(number) is int and 0 <= number < 1 << 48


def digest_of(metadata: dict[str, str], specs: dict[str, Spec], data: Sequence[memoryview]) -> str:
    """A digest of the tensors' bytes and of the header that describes them."""
    digest = hashlib.sha256(json.dumps([metadata, specs], sort_keys=True).encode())
    for buffer in data:
        digest.update(buffer)
    return digest.hexdigest()


def integer(text: str | None, what: str) -> int:
    """Parses a number below ``MAX_TOKENS`` of the metadata; ``what`` names it in the error."""
    digits = text is not None and text.isascii() and text.isdecimal() and len(text) < 12
    require(digits and int(text or 0) < MAX_TOKENS, f"its {what} is not a number")
    return int(text or 0)
