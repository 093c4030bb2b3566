"""Compiles kernels of ``mx.fast.cuda_kernel`` for a GPU, with NVIDIA's compiler: no GPU is needed.

The source around a kernel is as in MLX's ``custom_kernel.cpp``, which has the compiler's library
compile it when it is first called.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from emulator.kernels import TYPES, Kernel

ARCHITECTURE = "sm_90"
_PREAMBLE = """
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/cstdint>
#include <cuda/std/limits>
#define inf cuda::std::numeric_limits<float>::infinity()
"""
# Without NVIDIA's C++ library, which takes 0.4 s of each kernel's time even when precompiled.
_SHORT_PREAMBLE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/cstdint>
namespace cooperative_groups {}
#define inf __int_as_float(0x7f800000)
"""


class Compiled(NamedTuple):
    """A kernel's use of a processor: registers of a thread, and bytes that did not fit in them."""

    name: str
    registers: int
    spilled: int


@dataclass(frozen=True, kw_only=True)
class CompiledKernel(Kernel):
    """A kernel that is only compiled; a launch returns zeros.

    Attributes:
        done: gets each kernel that was compiled.

    Raises:
        RuntimeError: the source has an error; the compiler's messages.
    """

    done: list[Compiled]

    def launch(
        self,
        inputs: list[mx.array],
        constants: list[str],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: list[tuple[tuple[int, ...], mx.Dtype]],
    ) -> list[mx.array]:
        parameters = []
        for name, array in zip(self.input_names, inputs, strict=True):
            parameters.append(f"const {TYPES[array.dtype]}* {name}")
            for part, kind in (("shape", "int"), ("strides", "long")):
                if f"{name}_{part}" in self.source:
                    parameters.append(f"const __grid_constant__ Several<{kind}> {name}_{part}")
        for name, (_, dtype) in zip(self.output_names, outputs, strict=True):
            parameters.append(f"{TYPES[dtype]}* {name}")
        source = f"""
template <typename T> struct Several {{
  T numbers[8];
  __device__ const T& operator[](int i) const {{ return numbers[i]; }}
}};
{self.header}
namespace cg = cooperative_groups;
extern "C" __global__ void {self.name}({", ".join(parameters)}) {{
{chr(10).join(constants)}
{self.source}
}}
"""
        registers, spilled = _compile(source, self.header)
        self.done.append(Compiled(self.name, registers, spilled))
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]


def folder() -> Path | None:
    """NVIDIA's packages, or None if the compiler is not among them."""
    package = importlib.util.find_spec("nvidia")
    places = package.submodule_search_locations if package else None
    found = [Path(place, "cu13") for place in places or ()]
    return next((path for path in found if _libraries(path)), None)


def _libraries(path: Path) -> list[Path]:
    return sorted(path.glob("lib/libnvrtc.so.*"))


_headers: set[str] = set()  # of the kernels compiled so far


@functools.cache
def _compile(source: str, header: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that spilled.

    Only the first kernel of each header is compiled after all that MLX includes: whether names
    collide depends on the header, not on a kernel's template arguments.
    """
    path = folder()
    assert path is not None
    library = ctypes.CDLL(str(_libraries(path)[0]))
    preamble = _SHORT_PREAMBLE if header in _headers else _PREAMBLE
    _headers.add(header)
    source = preamble + source
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    options = [
        f"-arch={ARCHITECTURE}",
        "-std=c++17",
        "--ptxas-options=-v",
        "--pch",  # keeps what it has read of NVIDIA's headers for the next kernel
        *(f"-I{path}/include{part}" for part in ("", "/cccl")),
    ]
    try:
        failed = library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options))
        )
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    text = log.value.decode()
    if failed:
        raise RuntimeError(text)
    registers = re.findall(r"(\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill", text)
    return int(registers[0]) if registers else 0, sum(map(int, spills))
