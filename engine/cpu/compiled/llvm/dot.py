"""Products of quantized weights by the CPU's dot products of bytes (VNNI), compiled by LLVM.

An instruction adds four products of a code (a byte) and a whole number of 8 bits to each sum of a
register. ``digits`` writes the numbers of a token in a group of inputs as whole numbers of 24 bits,
relative to the largest of them, and each as three digits of 8 bits. ``dot_nibble`` and ``dot_byte``
add the products of codes and digits, without rounding, and multiply them by the scales of the token
and of the weights. The result is as exact as a float32 product: a number's last bit is 2**-23 of
the largest in its group. A token's sums do not depend on the other tokens, so its product is
identical to the last bit whichever tokens are multiplied beside it.

- A panel is one record for each group of inputs, as in ``llvm.quantized``, but with four inputs of
  an output side by side: codes of 8 bits ``[quads of inputs, registers, lanes, 4]``; of 4 bits
  ``[pairs of quads, registers, lanes, 4]``, the low halves of the bytes are the first quad's.
- The records of a token are those of ``llvm.digits``.
- Where the CPU has matrix units for bytes, ``llvm.dot_amx`` multiplies blocks of tokens.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VPDPBUSD.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm import dot_amx
from chairlift.engine.cpu.compiled.llvm.amx import DECLARATIONS, ROWS, permitted
from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.digits import DIGITS, HEAD_BYTES, digits
from chairlift.engine.cpu.compiled.llvm.dot_tiles import (
    QUAD,
    QUADS,
    dot_name,
    dot_tile,
    lookup_declaration,
)
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.panels import find_group
from chairlift.engine.cpu.compiled.llvm.quantized import BITS, record_size

# The bytes of a token's records.
_SIZES = f"""
  %group_digits = mul i64 %group_inputs, {DIGITS}
  %token_record = add i64 %group_digits, {HEAD_BYTES}
  %token = mul i64 %token_record, %input_groups
"""


class Registers(NamedTuple):
    """Vector registers: the 32-bit numbers of each, and the tokens whose sums they hold.

    Attributes:
        tiles: whether matrix units multiply blocks of tokens; see ``llvm.dot_amx``.
    """

    lanes: int
    tokens: int
    tiles: bool = False


class DotKernel(NamedTuple):
    """The compiled functions, of jobs that several threads may share; see ``llvm.jobs``.

    Attributes:
        lanes: 32-bit numbers of a register.
        outputs: outputs of a panel.
        tiles: see ``Registers``.
        digits: its parts are tokens. Arguments: the addresses of the inputs ``[tokens, inputs]``
            and of the tokens' records, the groups of inputs, and the inputs of a group.
        nibble, byte, e2m1: the parts are panels. Arguments: the addresses of the panels, of the
            tokens' records and of the result ``[tokens, stride]``, then tokens, groups of inputs,
            stride, and the inputs of a group.
        nibble_groups, byte_groups, e2m1_groups: multiply groups of tokens by matrices of their own,
            see ``llvm.kernel.Kernel``. Arguments: the addresses of the panels, of the tokens'
            records, of the result and of the groups, then panels of a matrix, groups of inputs,
            stride, and the inputs of a group.
    """

    lanes: int
    outputs: int
    tiles: bool
    digits: Function
    nibble: Function
    byte: Function
    e2m1: Function
    nibble_groups: Function
    byte_groups: Function
    e2m1_groups: Function


@functools.cache
def compiled() -> DotKernel | None:
    """The kernel; None without ``llvmlite``, or if the CPU has no such instruction."""
    compiler = host_compiler()
    registers = None if compiler is None else _registers(compiler.features)
    return None if registers is None else compile_for(registers)


def compile_for(registers: Registers) -> DotKernel | None:
    """The kernel for registers that this CPU has; None without ``llvmlite``."""
    compiler = host_compiler()
    if compiler is None:
        return None
    function = compiler.compile(_source(registers)).function
    products = [*(f"dot_{kind}" for kind in BITS), *(f"dot_{kind}_groups" for kind in BITS)]
    lanes, _, tiles = registers
    return DotKernel(lanes, WIDE * lanes, tiles, *map(function, ["digits", *products]))


def _registers(features: Mapping[str, bool]) -> Registers | None:
    if features.get("avx512vnni") and features.get("avx512bw"):
        return Registers(lanes=16, tokens=3, tiles=bool(features.get("amx-int8")) and permitted())
    return Registers(lanes=8, tokens=2) if features.get("avxvnni") else None


def _source(registers: Registers) -> str:
    """The kernel in LLVM's language."""
    lanes = registers.lanes
    floats, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    parts = [
        f"declare {floats} @llvm.{name}.v{lanes}f32({', '.join([floats] * arguments)})"
        for name, arguments in (("fma", 3), ("fabs", 1))
    ]
    parts += [
        f"declare float @llvm.vector.reduce.fmax.v{lanes}f32({floats})",
        f"declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {floats})",
        f"declare i32 @llvm.vector.reduce.add.v{lanes}i32({integers})",
        f"declare {integers} @{dot_name(lanes)}({', '.join([integers] * 3)})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        lookup_declaration(lanes),
        digits(lanes),
    ]
    if registers.tiles:
        parts += [DECLARATIONS, dot_amx.shared_functions()]
        parts += map(dot_amx.functions, BITS)
    for kind in BITS:
        parts += [dot_tile(kind, lanes, tokens) for tokens in range(1, registers.tokens + 1)]
        parts += [_panels(kind, registers), _groups(kind, registers)]
    return "\n".join(parts)


def _panels(kind: str, registers: Registers) -> str:
    """The function of ``DotKernel`` that has the name of the kind."""
    arguments = (
        "ptr %w, ptr %x, ptr %y, i64 %tokens, i64 %input_groups, i64 %stride, i64 %group_inputs"
    )
    body = _SIZES + _panel(kind, registers, "%part", "%x", "%y", "%part")
    return _shared(f"dot_{kind}", arguments, body, registers)


def _groups(kind: str, registers: Registers) -> str:
    """The function ``{kind}_groups`` of ``DotKernel``."""
    begin = f"""{find_group()}
  %gx = mul i64 %first_token, %token
  %xg = getelementptr i8, ptr %x, i64 %gx
  %gy = mul i64 %first_token, %stride
  %yg = getelementptr float, ptr %y, i64 %gy
"""
    arguments = (
        "ptr %w, ptr %x, ptr %y, ptr %groups, i64 %panels, i64 %input_groups, i64 %stride, "
        "i64 %group_inputs"
    )
    body = _SIZES + begin + _panel(kind, registers, "%index", "%xg", "%yg", "%panel")
    return _shared(f"dot_{kind}_groups", arguments, body, registers)


def _shared(name: str, arguments: str, body: str, registers: Registers) -> str:
    """See ``llvm.jobs.shared``; with the tokens for which the matrix units are configured."""
    if not registers.tiles:
        return shared(name, arguments, body)
    begin = "%configured = alloca i64, align 8\n  store i64 0, ptr %configured, align 8"
    return shared(name, arguments, body, begin, end="call void @llvm.x86.tilerelease()")


def _panel(kind: str, registers: Registers, panel: str, x: str, y: str, place: str) -> str:
    """Multiplies tokens by one panel; ends at ``%part_end``.

    Args:
        panel: the variable with the panel's number among all.
        x, y: those with the addresses of the tokens' records and of their results.
        place: that with the panel's number among those of the result.
    """
    outputs, most, quads = WIDE * registers.lanes, registers.tokens, QUADS[kind]
    cases = " ".join(f"i64 {tokens}, label %tile{tokens}" for tokens in range(1, most))
    operands = (
        "ptr %wp, ptr %xt, ptr %yt, i64 %input_groups, i64 %record, i64 %units, "
        "i64 %group_inputs, i64 %token, i64 %stride"
    )
    tiles = "\n".join(
        f"tile{tokens}:\n  call void @dot_{kind}_{tokens}({operands})\n  br label %tile_end"
        for tokens in range(1, most + 1)
    )
    block = _block(kind, operands) if registers.tiles else "  br label %few"
    ends = [("%number", f"tile{tokens}") for tokens in range(1, most + 1)]
    ends += [("%rows", "multiply")] if registers.tiles else []
    counts = ", ".join(f"[{count}, %{label}]" for count, label in ends)
    return f"""{record_size(kind, registers.lanes)}
  %units = udiv i64 %group_inputs, {QUAD * quads}
  %panel_bytes = mul i64 %input_groups, %record
  %wo = mul i64 {panel}, %panel_bytes
  %wp = getelementptr i8, ptr %w, i64 %wo
  %yo = mul i64 {place}, {outputs}
  %yp = getelementptr float, ptr {y}, i64 %yo
  br label %tokens_loop
tokens_loop:
  %t = phi i64 [0, %work], [%t_next, %tile_end]
  %xo = mul i64 %t, %token
  %xt = getelementptr i8, ptr {x}, i64 %xo
  %to = mul i64 %t, %stride
  %yt = getelementptr float, ptr %yp, i64 %to
  %left = sub i64 %tokens, %t
{block}
few:
  %whole = icmp uge i64 %left, {most}
  %number = select i1 %whole, i64 {most}, i64 %left
  switch i64 %number, label %tile{most} [ {cases} ]
{tiles}
tile_end:
  %count = phi i64 {counts}
  %t_next = add i64 %t, %count
  %t_more = icmp ult i64 %t_next, %tokens
  br i1 %t_more, label %tokens_loop, label %part_end
"""


def _block(kind: str, operands: str) -> str:
    """Multiplies a block of tokens by the matrix units if there are enough; else goes ``few``."""
    return f"""  %many = icmp uge i64 %left, {dot_amx.LEAST_TOKENS}
  br i1 %many, label %block, label %few
block:
  %full = icmp uge i64 %left, {ROWS}
  %rows = select i1 %full, i64 {ROWS}, i64 %left
  %rows.before = load i64, ptr %configured, align 8
  %rows.same = icmp eq i64 %rows, %rows.before
  br i1 %rows.same, label %multiply, label %configure
configure:
  call void @configure_tiles(i64 %rows, i64 %group_inputs)
  store i64 %rows, ptr %configured, align 8
  br label %multiply
multiply:
  call void @dot_{kind}_block({operands}, i64 %rows)
  br label %tile_end"""
