"""Runs kernels of ``mx.fast.cuda_kernel`` on the CPU: the same source, compiled by g++."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

HERE = Path(__file__).parent
# The header needs ELF sections and glibc's fibers.
COMPILER = shutil.which("g++") if sys.platform == "linux" else None
# Compiling takes longer than running, hence -Og. Linking to the usual libraries would take a third
# of the time, and Python has loaded those that a kernel uses: libc and libm.
FLAGS = (
    "-std=c++17 -Og -w -shared -fPIC -fno-strict-aliasing -fno-gnu-unique -fvisibility=hidden"
    " -fno-threadsafe-statics -nostdinc++ -nostdlib"
)
LIBRARIES = ["-lgcc"]  # conversions of half precision
TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.int64: "long",
    mx.uint32: "unsigned",
    mx.uint8: "unsigned char",
}
# CUDA's limits of a grid's blocks and of a block's threads, in each dimension.
MAX_BLOCKS, MAX_THREADS = (2**31 - 1, 2**16 - 1, 2**16 - 1), (1024, 1024, 64)
OUTCOMES = ("", "threads wait for others that never come", "lanes meet in different calls")


@contextmanager
def kernels_of(make: Callable[..., Kernel], *modules: ModuleType) -> Iterator[None]:
    """Lets the kernels of ``modules`` be made by ``make``, in place of ``mx.fast.cuda_kernel``.

    Args:
        modules: their cached functions forget what they know before and after.
    """
    kept = [each for module in modules for each in vars(module).values()]
    caches: list[Any] = [each for each in kept if hasattr(each, "cache_clear")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "cuda_kernel", make)
        for cache in caches:
            cache.cache_clear()
        yield
        for cache in caches:
            cache.cache_clear()


def emulated(module: ModuleType, backwards: bool) -> AbstractContextManager[None]:
    """A context in which the kernels of ``module`` run on the CPU.

    Args:
        backwards: the order of blocks and warps, and when copies complete; see ``emulator.h``.
    """
    return kernels_of(functools.partial(EmulatedKernel, backwards=backwards), module)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What ``mx.fast.cuda_kernel`` returns, made of its arguments."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    shared_memory: int = 0

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, object]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Launches the kernel.

        Raises:
            RuntimeError: CUDA allows no such launch.
        """
        blocks = [-(-size // width) for size, width in zip(grid, threadgroup, strict=True)]
        sizes = [*zip(blocks, MAX_BLOCKS, strict=True), *zip(threadgroup, MAX_THREADS, strict=True)]
        if any(not 0 < size <= most for size, most in sizes) or max(grid) >= 2**31:
            raise RuntimeError(f"{self.name}: a grid of {blocks} blocks of {threadgroup} threads")
        outputs = list(zip(map(tuple, output_shapes), output_dtypes, strict=True))
        return self.launch(list(inputs), constants(template), grid, threadgroup, outputs)

    def launch(
        self,
        inputs: list[mx.array],
        constants: list[str],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        """The results of a launch.

        Args:
            constants: C++ declarations of the template arguments.
            outputs: shape and type of each.
        """
        raise NotImplementedError


def constants(template: Sequence[tuple[str, object]]) -> list[str]:
    """C++ declarations of template arguments."""
    lines = []
    for name, argument in template:
        if isinstance(argument, mx.Dtype):
            lines.append(f"using {name} = {TYPES[argument]};")
        else:
            kind = "bool" if isinstance(argument, bool) else "int"
            lines.append(f"constexpr {kind} {name} = {int(argument)};")  # type: ignore[call-overload]
    return lines


@dataclass(frozen=True, kw_only=True)
class EmulatedKernel(Kernel):
    """A kernel that runs on the CPU; outputs hold NaN, or the least integer, before.

    Raises:
        RuntimeError: the threads of a block or a warp do not all reach the same call.
    """

    backwards: bool

    def launch(
        self,
        inputs: list[mx.array],
        constants: list[str],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        if self.ensure_row_contiguous:
            inputs = [mx.contiguous(array) for array in inputs]
        results = [
            mx.full(shape, -(2**31) if dtype == mx.int32 else float("nan"), dtype)
            for shape, dtype in outputs
        ]
        mx.eval(inputs, results)
        launch = _library(self._source([*inputs, *results], constants)).launch
        memory = [_memory(array) for array in (*inputs, *results)]
        numbers = [
            (ctypes.c_long * 16)(*array.shape, *(8 - array.ndim) * [0], *array_strides)
            for array, (_, array_strides) in zip(inputs, memory, strict=False)
        ]
        pointers = [ctypes.c_void_p(address) for address, _ in memory]
        blocks = [-(-size // width) for size, width in zip(grid, threadgroup, strict=True)]
        outcome = launch(
            (ctypes.c_uint * 3)(*blocks),
            (ctypes.c_uint * 3)(*threadgroup),
            self.backwards,
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.POINTER(ctypes.c_long) * len(numbers))(
                *(ctypes.cast(of_one, ctypes.POINTER(ctypes.c_long)) for of_one in numbers)
            ),
        )
        if outcome:
            raise RuntimeError(OUTCOMES[outcome])
        return results

    def _source(self, arrays: Sequence[mx.array], constants: Sequence[str]) -> str:
        """The whole C++ source, with the parameters that MLX would generate as local variables."""
        lines = []
        for i, (name, array) in enumerate(zip(self.input_names, arrays, strict=False)):
            lines.append(f"const auto {name} = (const {TYPES[array.dtype]}*)arrays[{i}];")
            lines += [f"const long* {name}_shape = numbers[{i}];"] * (
                f"{name}_shape" in self.source
            )
            if f"{name}_strides" in self.source:
                lines.append(f"const long* {name}_strides = numbers[{i}] + 8;")
        for i, name in enumerate(self.output_names, len(self.input_names)):
            lines.append(f"const auto {name} = ({TYPES[arrays[i].dtype]}*)arrays[{i}];")
        lines += constants
        return f"""
#include "emulator.h"
{self.header}
namespace {{
void** arrays;
long** numbers;
void kernel(void*) {{
{chr(10).join(lines)}
{self.source}
}}
}}
extern "C" __attribute__((visibility("default"))) int launch(
    const unsigned* grid, const unsigned* block, bool backwards, void** all, long** all_numbers) {{
  arrays = all;
  numbers = all_numbers;
  return launch(grid, block, backwards, kernel, nullptr);
}}
"""


def _memory(array: mx.array) -> tuple[int, list[int]]:
    """Address of an evaluated array's own memory, and its strides in elements."""
    wide = np.array(
        array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.itemsize]),
        copy=False,
    )
    return wide.ctypes.data, [stride // array.itemsize for stride in wide.strides]


@functools.cache
def _library(source: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        code.write_text(source)
        _compile(f"-I{_headers()}", str(code), "-o", str(library), *LIBRARIES)
        return ctypes.CDLL(str(library))


@functools.cache
def _headers() -> str:
    """A folder with the headers, compiled once in a process: half of a small kernel's time."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for header in HERE.glob("*.h"):
        shutil.copy(header, folder)
    _compile("-x", "c++-header", f"{folder}/emulator.h")
    return folder


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    command = [COMPILER, *FLAGS.split(), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
