"""Matrix products compiled for this CPU by LLVM (the package ``llvmlite``).

A BLAS rearranges the weights in each product, which for few tokens takes as long as the product.
Here they are stored as the kernel reads them: in panels of some outputs, and in a panel the weights
of one input after those of the other. A panel's weights may be float32 or bfloat16, which is the
upper half of a float32; sums are in float32, of one input after the other. So a token's product is
identical to the last bit whichever tokens are multiplied beside it.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm import attention, elementwise, quantized
from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm.jobs import LINE_BYTES
from chairlift.engine.cpu.compiled.llvm.panels import Registers, groups, panels
from chairlift.engine.cpu.compiled.llvm.row_attention import kernel as row_attention
from chairlift.engine.cpu.compiled.llvm.softmax import loaded
from chairlift.engine.cpu.compiled.llvm.tiles import tile

# The products of ``llvm.row_attention``, and the bytes of the numbers that they prefetch.
_FETCHING = {"scores_float": 4, "scores_half": 2, "values_half": 2}


class Kernel(NamedTuple):
    """The compiled functions, of jobs that several threads may share; see ``llvm.jobs``.

    Attributes:
        lanes: numbers of a register.
        outputs: outputs of a panel.
        float32: multiplies ``[tokens, inputs]`` by panels in float32, which are its parts. First
            arguments: the addresses of the panels, of the tokens and of the result
            ``[tokens, stride]``, then tokens, inputs, stride.
        bfloat16: the same for panels in bfloat16.
        float32_groups: multiplies groups of tokens by matrices of their own, whose panels are one
            after the other. A part is a panel of a group. First arguments: the addresses of the
            panels, of the tokens, of the result and of the groups, then panels of a matrix, inputs,
            stride. A group is three numbers: its matrix, its first token and its tokens.
        bfloat16_groups: the same for panels in bfloat16.
        nibble, byte, e2m1, nibble_groups, byte_groups, e2m1_groups: the same for panels of
            quantized weights, see ``llvm.quantized``. One further argument: the inputs of a group
            of the quantization.
        transposed: see ``llvm.attention``.
        plain: see ``llvm.attention``.
        rows, rows_half: see ``llvm.row_attention``.
        swiglu, geglu, norm, add, scale, scatter, scatter_half, rotate: see ``llvm.elementwise``.
    """

    lanes: int
    outputs: int
    float32: Function
    bfloat16: Function
    float32_groups: Function
    bfloat16_groups: Function
    nibble: Function
    byte: Function
    e2m1: Function
    nibble_groups: Function
    byte_groups: Function
    e2m1_groups: Function
    transposed: Function
    plain: Function
    rows: Function
    rows_half: Function
    swiglu: Function
    geglu: Function
    norm: Function
    add: Function
    scale: Function
    scatter: Function
    scatter_half: Function
    rotate: Function


def available() -> bool:
    """Whether ``llvmlite`` is installed, and this CPU multiplies and adds in one instruction."""
    return compiled() is not None


@functools.cache
def compiled() -> Kernel | None:
    """The kernel for this CPU; None if it is not ``available``."""
    compiler = host_compiler()
    registers = None if compiler is None else _registers(compiler.features)
    if compiler is None or registers is None:
        return None
    function = compiler.compile(_source(registers)).function
    products = ["float", "bfloat", "float_groups", "bfloat_groups"]
    products += [*quantized.BITS, *(f"{kind}_groups" for kind in quantized.BITS)]
    attention = ("transposed", "plain", "rows", "rows_half")
    others = ("swiglu", "geglu", "norm", "add", "scale", "scatter", "scatter_half", "rotate")
    names = (*products, *attention, *others)
    return Kernel(registers.lanes, WIDE * registers.lanes, *map(function, names))


def _registers(features: Mapping[str, bool]) -> Registers | None:
    if platform.machine() in ("aarch64", "arm64"):
        return Registers(lanes=4, tokens=8, quantized=8)
    if not all(map(features.get, ("avx2", "fma", "f16c"))):
        return None
    return Registers(16, 12, 10) if features.get("avx512f") else Registers(8, 6, 4)


def _source(registers: Registers) -> str:
    """The kernel in LLVM's language."""
    vector, integers = f"<{registers.lanes} x float>", f"<{registers.lanes} x i32>"
    parts = [
        f"declare {vector} @llvm.fma.v{registers.lanes}f32({vector}, {vector}, {vector})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        f"declare {integers} @llvm.usub.sat.v{registers.lanes}i32({integers}, {integers})",
    ]
    for kind in ("float", "bfloat", *quantized.BITS):
        make = quantized.quantized_tile if kind in quantized.BITS else _tile
        counts = range(1, registers.tokens_of(kind) + 1)
        parts += [make(kind, registers.lanes, tokens) for tokens in counts]
        parts += [panels(kind, registers), groups(kind, registers)]
    for kind in _FETCHING:
        parts += [_tile(kind, registers.lanes, n) for n in range(1, registers.tokens + 1)]
    parts += [quantized.expand(kind, registers.lanes) for kind in quantized.BITS]
    parts.append(attention.source(registers.lanes, registers.tokens))
    parts.append(row_attention.source(registers.lanes, registers.tokens))
    parts.append(elementwise.source(registers.lanes))
    return "\n".join(parts)


def _tile(kind: str, lanes: int, tokens: int) -> str:
    """A tile of float32 or bfloat16 weights.

    Those of an input are ``step`` numbers after those of the input before. With bfloat16, which
    only panels have, the next panel is prefetched while this one is multiplied. The kinds of
    ``_FETCHING`` prefetch as many numbers as a panel has from the address of a further argument.
    """
    end = [
        "%next = add i64 %i, 1",
        "%more = icmp ult i64 %next, %count",
        "br i1 %more, label %loop, label %end",
        "end:",
    ]
    more = ", ptr %fetched" if kind in _FETCHING else ""
    return tile(kind, lanes, tokens, partial(_inputs, kind, lanes), end, more)


def _inputs(kind: str, lanes: int, sums: Sequence[str]) -> list[str]:
    """See ``begin`` of ``tile``."""
    vector, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    shifts = ", ".join(["i32 16"] * lanes)
    element = {"bfloat": "i16", "values_half": "half"}.get(kind, "float")
    registers = f"<{lanes} x {element}>"
    lines = ["br label %loop", "loop:", "%i = phi i64 [0, %entry], [%next, %loop]"]
    lines += [f"%s{name} = phi {vector} [%b{name}, %entry], [%n{name}, %loop]" for name in sums]
    lines += ["%at = mul i64 %i, %step", f"%wi = getelementptr {element}, ptr %w, i64 %at"]
    if kind == "bfloat":
        lines += [
            f"%ahead = mul i64 %inputs, {WIDE * lanes}",
            "%wa = getelementptr i16, ptr %wi, i64 %ahead",
            "call void @llvm.prefetch.p0(ptr %wa, i32 0, i32 2, i32 1)",
        ]
    if kind in _FETCHING:
        width = _FETCHING[kind] * WIDE * lanes
        lines.append(f"%fetch = mul i64 %i, {width}")
        for line in range(0, width, LINE_BYTES):
            lines += [
                f"%fo{line} = add i64 %fetch, {line}",
                f"%fp{line} = getelementptr i8, ptr %fetched, i64 %fo{line}",
                f"call void @llvm.prefetch.p0(ptr %fp{line}, i32 0, i32 2, i32 1)",
            ]
    for wide in range(WIDE):
        lines.append(f"%wp{wide} = getelementptr {registers}, ptr %wi, i64 {wide}")
        if kind != "bfloat":
            lines += loaded(f"%w{wide}", lanes, element, f"%wp{wide}")
            continue
        lines += [
            f"%h{wide} = load {registers}, ptr %wp{wide}, align 2",
            f"%e{wide} = zext {registers} %h{wide} to {integers}",
            f"%u{wide} = shl {integers} %e{wide}, <{shifts}>",
            f"%w{wide} = bitcast {integers} %u{wide} to {vector}",
        ]
    return lines
