"""The CUDA source of the kernels, in files that ``mx.fast.cuda_kernel`` includes.

MLX hashes a kernel's source each time it launches it. Sources of 20 KB took a tenth of the time in
which the host launches a step of few rows; with files, a source is a few lines.

A file holds functions, the body of a kernel, or a part of one. MLX generates the signature from the
names of inputs, outputs and template arguments.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

# MLX passes a kernel the shape of an input if the source contains this name.
_SHAPE = re.compile(r"\b\w+_(?:shape|strides|ndim)\b")


def included(*names: str) -> str:
    """Source that consists of these files, one after the other."""
    return "".join(map(_included, names))


@functools.cache
def _included(name: str) -> str:
    path = (Path(__file__).parent / f"{name}.cuh").resolve()
    shapes = sorted(set(_SHAPE.findall(path.read_text())))
    return f'\n// {" ".join(shapes)}\n#include "{path.as_posix()}"\n'


def launch_bounds(threads: int, blocks: int) -> str:
    """Limits a kernel's registers, so that some of its blocks fit on a processor. Part of a header.

    Args:
        threads: of a block.
        blocks: at least on one processor at a time.
    """
    bounds = f"__launch_bounds__({threads}, {blocks})"
    # MLX writes the kernel's signature, and has no argument for this.
    return f"#undef __global__\n#define __global__ __attribute__((global)) {bounds}\n"
