"""safetensors files, read without trust: every number in a header is checked before it is used.

Arrays are plain memory here, for any thread; MLX has no part in it.
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

# safetensors' types; numpy has no bfloat16, whose bits are kept as they are.
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
    """A file is not a state that can be used, in one line. An OSError is the cause, if one was."""


class Tensor(NamedTuple):
    """An array's memory and its safetensors type; bfloat16 as uint16."""

    dtype: str
    data: Array


class Spec(NamedTuple):
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

    def tensor(self, data: memoryview) -> Tensor:
        try:
            empty = np.zeros(self.shape, NUMPY[self.dtype]) if not len(data) else None
            flat = np.frombuffer(data, NUMPY[self.dtype]) if empty is None else empty
            # A foreign writer may put an array at an odd place.
            array = np.require(flat.reshape(self.shape), requirements="A")
        except ValueError as error:
            raise SavedStateError(f"a shape of {self.shape} is not possible") from error
        return Tensor(self.dtype, array)


class Header(NamedTuple):
    metadata: dict[str, str]
    specs: dict[str, Spec]
    offset: int
    nbytes: int

    def read(self, file: BinaryIO, name: str) -> Tensor | None:
        spec = self.specs.get(name)
        if spec is None:
            return None
        file.seek(self.offset + spec.begin)
        data = file.read(spec.end - spec.begin)
        require(len(data) == spec.end - spec.begin, "it is truncated")
        return spec.tensor(memoryview(data))

    def read_all(self, file: BinaryIO) -> tuple[dict[str, Tensor], memoryview]:
        file.seek(self.offset)
        data = memoryview(file.read(self.nbytes))
        require(len(data) == self.nbytes, "it is truncated")
        return {
            name: spec.tensor(data[spec.begin : spec.end]) for name, spec in self.specs.items()
        }, (data)


def require(condition: bool, message: str) -> None:
    if not condition:
        raise SavedStateError(message)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file, and turns whatever goes wrong with it into one line that names it."""
    try:
        with path.open("rb") as file:
            yield file
    except SavedStateError as error:
        raise SavedStateError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        raise SavedStateError(f"{path}: {error.strerror or error}") from error


def read_header(file: BinaryIO) -> Header:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    require(2 <= length <= min(_MAX_HEADER, size - 8), "it is truncated or no safetensors file")
    try:
        entries = json.loads(file.read(length).decode(), object_pairs_hook=_no_twins)
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


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
    return type(number) is int and 0 <= number < 1 << 48


def digest_of(metadata: dict[str, str], specs: dict[str, Spec], data: Sequence[memoryview]) -> str:
    """Of the tensors' bytes, and of all that says what they mean."""
    digest = hashlib.sha256(json.dumps([metadata, specs], sort_keys=True).encode())
    for buffer in data:
        digest.update(buffer)
    return digest.hexdigest()


def integer(text: str | None, what: str) -> int:
    digits = text is not None and text.isascii() and text.isdecimal() and len(text) < 12
    require(digits and int(text or 0) < MAX_TOKENS, f"its {what} is not a number")
    return int(text or 0)
