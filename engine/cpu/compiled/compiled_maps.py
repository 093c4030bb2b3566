"""Elementwise functions of arrays with any strides, by ``llvm.maps``.

Each is False where it does not apply, and else adds a job that writes ``into``.

The arrays are float32, of one shape; an axis along which a number repeats has a stride of 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from chairlift.engine.cpu.compiled.jobs import MIN_SHARED, Run, run_shared
from chairlift.engine.cpu.compiled.llvm import maps
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function
from chairlift.engine.cpu.gemm import Floats

# Lines of fewer numbers cost NumPy less than a call each, if there are more than so many lines.
SHORT_LINE, LARGE = 4, 64


def mapped(name: str, inputs: Sequence[Floats], into: Floats, run: Run) -> bool:
    """One of ``llvm.maps``'s functions of one or two numbers."""
    compiled = maps.compiled()
    if compiled is None or not all(map(_is_plain, (*inputs, into))) or not into.size:
        return False
    layout = _layout([*inputs, into])
    if layout is None:
        return False
    *inner, written = layout.inner
    short = layout.numbers < SHORT_LINE and into.size > LARGE * layout.numbers
    if short or written != 1 or not set(inner) <= {0, 1} or not any(inner):
        return False
    lines, left, right = maps.ENDINGS
    ending = lines if all(inner) else right if inner[0] else left
    _add(compiled.functions[f"{name}_{ending}"], layout, [*inputs, into], run)
    return True


def summed(x: Floats, into: Floats, run: Run) -> bool:
    """The sum of the last axis.

    Args:
        into: as ``x``, with one number in the last axis.
    """
    compiled = maps.compiled()
    if compiled is None or not (_is_plain(x) and _is_plain(into)) or not x.size:
        return False
    if x.strides[-1] != x.itemsize:
        return False
    layout = _layout([x[..., 0], into[..., 0]], last=x.shape[-1])
    if layout is None:
        return False
    _add(compiled.functions["sum"], layout, [x, into], run)
    return True


def of_lines(name: str, x: Floats) -> Floats | None:
    """One of ``llvm.maps``'s functions of one number, at once and on all cores.

    Args:
        x: ``[lines, numbers]``, contiguous.

    Returns:
        As ``x``, in new memory; None if there is no kernel.
    """
    compiled = maps.compiled()
    if compiled is None or not x.size:
        return None
    result = np.empty_like(x)
    lines, numbers = x.shape
    layout = _Layout(numbers, (1, 1, lines), [(0, 0, numbers)] * 2, (1, 1))
    _add(compiled.functions[f"{name}_{maps.ENDINGS[0]}"], layout, [x, result], run_shared)
    return result


class _Layout:
    """The common axes of arrays of one shape.

    Attributes:
        numbers: those of a line.
        sizes: of the axes of lines, ``maps.OUTER`` of them.
        strides: of each array, in numbers, along these axes.
        inner: the stride of each array within a line.
    """

    def __init__(
        self,
        numbers: int,
        sizes: Sequence[int],
        strides: Sequence[Sequence[int]],
        inner: Sequence[int],
    ) -> None:
        self.numbers, self.sizes, self.strides, self.inner = numbers, sizes, strides, inner


def _layout(arrays: Sequence[Floats], last: int | None = None) -> _Layout | None:
    """The layout with as few axes as possible; None if it has too many.

    Args:
        last: the numbers of a line, if the arrays have no axis for these.
    """
    axes: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(arrays[0].shape):
        own = [each.strides[axis] // each.itemsize for each in arrays]
        if size == 1:
            continue
        if axes and all(a == b * size for a, b in zip(axes[-1][1], own, strict=True)):
            axes[-1] = axes[-1][0] * size, own
        else:
            axes.append((size, own))
    if last is None:
        ends = axes and all(stride in (0, 1) for stride in axes[-1][1]) and axes[-1][1][-1] == 1
        last, inner = axes.pop() if ends else (1, [1] * len(arrays))
    else:
        inner = [1] * len(arrays)
    if len(axes) > maps.OUTER:
        return None
    axes = [(1, [0] * len(arrays))] * (maps.OUTER - len(axes)) + axes
    strides = [[own[place] for _, own in axes] for place in range(len(arrays))]
    return _Layout(last, [size for size, _ in axes], strides, inner)


def _add(function: Function, layout: _Layout, arrays: Sequence[Floats], run: Run) -> None:
    parts = int(np.prod(layout.sizes))
    run(
        function,
        *(each.ctypes.data for each in arrays),
        *(layout.numbers, *layout.sizes[1:]),
        *(stride for own in layout.strides for stride in own),
        parts=parts,
        is_shared=parts * layout.numbers >= MIN_SHARED,
    )


def _is_plain(array: Floats) -> bool:
    return array.dtype == np.float32 and all(
        stride % array.itemsize == 0 for stride in array.strides
    )
