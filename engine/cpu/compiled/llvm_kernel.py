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
from collections.abc import Mapping
from typing import NamedTuple

from chairlift.engine.cpu.compiled import llvm_attention, llvm_elementwise, llvm_row_attention
from chairlift.engine.cpu.compiled.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm_attention import WIDE
from chairlift.engine.cpu.compiled.llvm_jobs import shared

# Inputs whose weights in a panel stay in the L1 or L2 cache while all tokens are multiplied.
_BLOCK = 1024


class Kernel(NamedTuple):
    """The compiled functions, of jobs that several threads may share; see ``llvm_jobs``.

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
        transposed: see ``llvm_attention``.
        plain: see ``llvm_attention``.
        rows: see ``llvm_row_attention``.
        swiglu, geglu, norm, add, scale, scatter, rotate: see ``llvm_elementwise``.
    """

    lanes: int
    outputs: int
    float32: Function
    bfloat16: Function
    float32_groups: Function
    bfloat16_groups: Function
    transposed: Function
    plain: Function
    rows: Function
    swiglu: Function
    geglu: Function
    norm: Function
    add: Function
    scale: Function
    scatter: Function
    rotate: Function


class _Registers(NamedTuple):
    """Vector registers: the float32 numbers of each, and the tokens whose sums they hold."""

    lanes: int
    tokens: int


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
    products = ("float", "bfloat", "float_groups", "bfloat_groups")
    attention = ("transposed", "plain", "rows")
    others = ("swiglu", "geglu", "norm", "add", "scale", "scatter", "rotate")
    names = (*products, *attention, *others)
    return Kernel(registers.lanes, WIDE * registers.lanes, *map(function, names))


def _registers(features: Mapping[str, bool]) -> _Registers | None:
    if platform.machine() in ("aarch64", "arm64"):
        return _Registers(lanes=4, tokens=8)
    if not (features.get("avx2") and features.get("fma")):
        return None
    return _Registers(16, 12) if features.get("avx512f") else _Registers(8, 6)


def _source(registers: _Registers) -> str:
    """The kernel in LLVM's language."""
    vector = f"<{registers.lanes} x float>"
    parts = [
        f"declare {vector} @llvm.fma.v{registers.lanes}f32({vector}, {vector}, {vector})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    ]
    for kind in ("float", "bfloat"):
        counts = range(1, registers.tokens + 1)
        parts += [_tile(kind, registers.lanes, tokens) for tokens in counts]
        parts += [_panels(kind, registers), _groups(kind, registers)]
    for attention in (llvm_attention, llvm_row_attention):
        parts.append(attention.source(registers.lanes, registers.tokens))
    parts.append(llvm_elementwise.source(registers.lanes))
    return "\n".join(parts)


def _tile(kind: str, lanes: int, tokens: int) -> str:
    """A function that adds a block of inputs to the sums of some tokens and one panel.

    The weights of an input are ``step`` numbers after those of the input before. With bfloat16,
    which only panels have, the next panel is prefetched while this one is multiplied.
    """
    vector, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    loaded = vector if kind == "float" else f"<{lanes} x i16>"
    shifts = ", ".join(["i32 16"] * lanes)
    sums = [(token, wide) for token in range(tokens) for wide in range(WIDE)]
    lines = [
        f"define internal void @{kind}_{tokens}(ptr %w, ptr %x, ptr %y, i64 %inputs, "
        "i64 %count, i64 %stride, i64 %step, i1 %first) {",
        "entry:",
    ]
    for token in range(tokens):
        lines += [
            f"%xo{token} = mul i64 %inputs, {token}",
            f"%x{token} = getelementptr float, ptr %x, i64 %xo{token}",
            f"%yo{token} = mul i64 %stride, {token}",
            f"%y{token} = getelementptr float, ptr %y, i64 %yo{token}",
        ]
    for token, wide in sums:
        name = f"{token}_{wide}"
        lines += [
            f"%p{name} = getelementptr {vector}, ptr %y{token}, i64 {wide}",
            f"%l{name} = load {vector}, ptr %p{name}, align 4",
            f"%b{name} = select i1 %first, {vector} zeroinitializer, {vector} %l{name}",
        ]
    lines += ["br label %loop", "loop:", "%i = phi i64 [0, %entry], [%next, %loop]"]
    for token, wide in sums:
        name = f"{token}_{wide}"
        lines.append(f"%s{name} = phi {vector} [%b{name}, %entry], [%n{name}, %loop]")
    element = "float" if kind == "float" else "i16"
    lines += ["%at = mul i64 %i, %step", f"%wi = getelementptr {element}, ptr %w, i64 %at"]
    if kind == "bfloat":
        lines += [
            f"%ahead = mul i64 %inputs, {WIDE * lanes}",
            "%wa = getelementptr i16, ptr %wi, i64 %ahead",
            "call void @llvm.prefetch.p0(ptr %wa, i32 0, i32 2, i32 1)",
        ]
    for wide in range(WIDE):
        lines.append(f"%wp{wide} = getelementptr {loaded}, ptr %wi, i64 {wide}")
        if kind == "float":
            lines.append(f"%w{wide} = load {loaded}, ptr %wp{wide}, align 4")
            continue
        lines += [
            f"%h{wide} = load {loaded}, ptr %wp{wide}, align 2",
            f"%e{wide} = zext {loaded} %h{wide} to {integers}",
            f"%u{wide} = shl {integers} %e{wide}, <{shifts}>",
            f"%w{wide} = bitcast {integers} %u{wide} to {vector}",
        ]
    for token in range(tokens):
        lines += [
            f"%xp{token} = getelementptr float, ptr %x{token}, i64 %i",
            f"%v{token} = load float, ptr %xp{token}, align 4",
            f"%o{token} = insertelement {vector} poison, float %v{token}, i32 0",
            f"%a{token} = shufflevector {vector} %o{token}, {vector} poison, "
            f"{integers} zeroinitializer",
        ]
    for token, wide in sums:
        name = f"{token}_{wide}"
        lines.append(
            f"%n{name} = call {vector} @llvm.fma.v{lanes}f32({vector} %a{token}, "
            f"{vector} %w{wide}, {vector} %s{name})"
        )
    lines += [
        "%next = add i64 %i, 1",
        "%more = icmp ult i64 %next, %count",
        "br i1 %more, label %loop, label %end",
        "end:",
    ]
    for token, wide in sums:
        name = f"{token}_{wide}"
        lines.append(f"store {vector} %n{name}, ptr %p{name}, align 4")
    return "\n".join([*lines, "ret void", "}"])


def _panels(kind: str, registers: _Registers) -> str:
    """The function that takes panels until none is left; see ``Kernel``."""
    arguments = "ptr %w, ptr %x, ptr %y, i64 %tokens, i64 %inputs, i64 %stride"
    return shared(kind, arguments, _panel(kind, registers, "%part", "%x", "%y"))


def _groups(kind: str, registers: _Registers) -> str:
    """The function that takes panels of groups until none is left; see ``Kernel``."""
    begin = """
  %group = udiv i64 %part, %panels
  %panel = urem i64 %part, %panels
  %go = mul i64 %group, 3
  %g0 = getelementptr i64, ptr %groups, i64 %go
  %g1 = getelementptr i64, ptr %g0, i64 1
  %g2 = getelementptr i64, ptr %g0, i64 2
  %matrix = load i64, ptr %g0, align 8
  %token = load i64, ptr %g1, align 8
  %tokens = load i64, ptr %g2, align 8
  %mo = mul i64 %matrix, %panels
  %index = add i64 %mo, %panel
  %gx = mul i64 %token, %inputs
  %xg = getelementptr float, ptr %x, i64 %gx
  %gy = mul i64 %token, %stride
  %yg = getelementptr float, ptr %y, i64 %gy
"""
    arguments = "ptr %w, ptr %x, ptr %y, ptr %groups, i64 %panels, i64 %inputs, i64 %stride"
    body = begin + _panel(kind, registers, "%index", "%xg", "%yg", "%panel")
    return shared(f"{kind}_groups", arguments, body)


def _panel(
    kind: str, registers: _Registers, panel: str, x: str, y: str, place: str = "%part"
) -> str:
    """Multiplies tokens by one panel; ends at ``%part_end``.

    The tokens are divided evenly: a small tile takes nearly as long as a large one.

    Args:
        panel: the variable with the panel's number among all.
        x, y: those with the addresses of the tokens and of their results.
        place: that with the panel's number among those of the result.
    """
    outputs, most = WIDE * registers.lanes, registers.tokens
    tiles = "\n".join(
        f"tile{tokens}:\n"
        f"call void @{kind}_{tokens}(ptr %wb, ptr %xt, ptr %yt, i64 %inputs, i64 %count, "
        f"i64 %stride, i64 {outputs}, i1 %first)\n"
        "br label %tokens_end"
        for tokens in range(1, most + 1)
    )
    cases = " ".join(f"i64 {tokens}, label %tile{tokens}" for tokens in range(1, most))
    element = "float" if kind == "float" else "i16"
    return f"""
  %weights = mul i64 %inputs, {outputs}
  %wo = mul i64 {panel}, %weights
  %wp = getelementptr {element}, ptr %w, i64 %wo
  %yo = mul i64 {place}, {outputs}
  %yp = getelementptr float, ptr {y}, i64 %yo
  br label %block
block:
  %k = phi i64 [0, %work], [%k_next, %block_end]
  %first = icmp eq i64 %k, 0
  %left = sub i64 %inputs, %k
  %small = icmp ule i64 %left, {_BLOCK}
  %count = select i1 %small, i64 %left, i64 {_BLOCK}
  %bo = mul i64 %k, {outputs}
  %wb = getelementptr {element}, ptr %wp, i64 %bo
  %xb = getelementptr float, ptr {x}, i64 %k
  br label %tokens_loop
tokens_loop:
  %t = phi i64 [0, %block], [%t_next, %tokens_end]
  %xo = mul i64 %t, %inputs
  %xt = getelementptr float, ptr %xb, i64 %xo
  %to = mul i64 %t, %stride
  %yt = getelementptr float, ptr %yp, i64 %to
  %rest = sub i64 %tokens, %t
  %rest_up = add i64 %rest, {most - 1}
  %tiles = udiv i64 %rest_up, {most}
  %others = sub i64 %tiles, 1
  %tile_up = add i64 %rest, %others
  %tile = udiv i64 %tile_up, %tiles
  switch i64 %tile, label %tile{most} [ {cases} ]
{tiles}
tokens_end:
  %t_next = add i64 %t, %tile
  %t_more = icmp ult i64 %t_next, %tokens
  br i1 %t_more, label %tokens_loop, label %block_end
block_end:
  %k_next = add i64 %k, %count
  %k_more = icmp ult i64 %k_next, %inputs
  br i1 %k_more, label %block, label %part_end
"""
