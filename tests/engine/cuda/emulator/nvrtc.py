"""Compiles kernels of ``mx.fast.cuda_kernel`` for a GPU, with NVIDIA's compiler: no GPU is needed.

The source around a kernel is as in MLX's ``custom_kernel.cpp``, which has the compiler's library
compile it when it is first called.

A kernel takes a second, so ``compiled.json`` contains what the compiler has made of each source:
only other sources are compiled, and one kernel of each header, which must give what the file says.
``make kernels`` compiles all of them and writes the file.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import re
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
from emulator.kernels import TYPES, Kernel

ARCHITECTURE = "sm_90"
_OPTIONS = (f"-arch={ARCHITECTURE}", "-std=c++17", "--ptxas-options=-v")
# NVIDIA's packages that a kernel is made with: the compiler and its headers.
_PACKAGES = [f"nvidia-cuda-{name}" for name in ("nvrtc", "runtime", "crt", "cccl")]
_FILE = Path(__file__).with_name("compiled.json")
_INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_COMPILES_ALL = "COMPILE_KERNELS" in os.environ
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
        registers, spilled = _registers(self.name, source, self.header)
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


class Record(NamedTuple):
    """What is known of kernels without compiling them.

    Attributes:
        compiler: the versions of NVIDIA's packages that have compiled them.
        kernels: registers of a thread, and bytes that spilled, by ``_key``.
    """

    compiler: str
    kernels: dict[str, tuple[int, int]]


@functools.cache
def compiler() -> str:
    return ", ".join(f"{name} {version(name)}" for name in _PACKAGES)


@functools.cache
def record() -> Record:
    """The file's content."""
    content = json.loads(_FILE.read_text())
    return Record(content["compiler"], {key: tuple(of) for key, of in content["kernels"].items()})


# The kernels that this process has compiled.
compiled_here: dict[str, tuple[int, int]] = {}


def missing() -> set[str]:
    """The kernels that were compiled because the file, which this compiler wrote, lacks them."""
    known = record()
    return compiled_here.keys() - known.kernels if known.compiler == compiler() else set()


def write_record() -> None:
    """Writes the file, if all kernels were to be compiled."""
    if _COMPILES_ALL:
        kernels = dict(sorted(compiled_here.items()))
        lines = ",\n".join(f'  "{key}": {list(of)}' for key, of in kernels.items())
        _FILE.write_text(f'{{"compiler": "{compiler()}",\n"kernels": {{\n{lines}\n}}}}\n')
        record.cache_clear()


def _key(name: str, source: str) -> str:
    """Names all that is compiled and how, wherever the included files are."""
    text = "\n".join((_with_files(source), _PREAMBLE, _SHORT_PREAMBLE, *_OPTIONS))
    return f"{name} {sha256(text.encode()).hexdigest()[:24]}"


def _with_files(source: str) -> str:
    """The source with our files in place of their inclusions."""
    return _INCLUDED.sub(lambda found: _with_files(Path(found[1]).read_text()), source)


@functools.cache
def _registers(name: str, source: str, header: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that spilled, as compiled now or before.

    The first kernel of each header is always compiled, after all that MLX includes: whether names
    collide depends on the header, not on a kernel's template arguments.
    """
    key, known = _key(name, source), record()
    expected = known.kernels.get(key) if known.compiler == compiler() else None
    first = header not in _headers
    if expected is not None and not first and not _COMPILES_ALL:
        return expected
    _headers.add(header)
    found = _compile((_PREAMBLE if first else _SHORT_PREAMBLE) + source)
    compiled_here[key] = found
    assert _COMPILES_ALL or expected in (None, found), f"{key}: run `make kernels`"
    return found


def _compile(source: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that spilled."""
    path = folder()
    assert path is not None
    library = ctypes.CDLL(str(_libraries(path)[0]))
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    options = [
        *_OPTIONS,
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
