"""Matrix products by Intel's matrix units (AMX), compiled by LLVM.

The units multiply tiles of bfloat16 numbers and add the products to tiles of float32 numbers.
``split`` writes each input number as three bfloat16 numbers, which together have its 24 bits, and
``multiply`` adds the products of all three to one sum. The result is as exact as a float32 product
with weights that are bfloat16 numbers. A row of a tile does not depend on the other rows, and sums
are always of one step of inputs after the other. So a token's product is identical to the last bit
whichever tokens are multiplied beside it.

All tiles have 16 rows of 64 bytes, and are contiguous:

- of the weights, ``[panels, steps, halves of a panel]``: 32 inputs and 16 outputs each, pairs of
  inputs side by side;
- of the pieces, ``[blocks of 16 tokens, steps, pieces]``: 16 tokens and 32 inputs each.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm.jobs import LINE_BYTES, shared

# Tokens and outputs of a tile, inputs of a step, and outputs of a panel.
ROWS = 16
INPUTS = 32
OUTPUTS = 2 * ROWS
# A float32 number is the sum of this many bfloat16 numbers; the first has its upper bits.
PIECES = 3
TILE_BYTES = 1024
# Few tokens wait for the memory of the weights: those of so many steps ahead are prefetched. For a
# single block of tokens they go to the L2 cache, which requests more lines at a time than the L1.
_AHEAD = 4
_CACHE = {1: 2, 2: 3}
# Linux's system call by which a process asks for the units' state: arch_prctl(
# ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_REQUEST = (158, 0x1023, 18)

# The instructions for tiles of any type.
DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)"""


class AmxKernel(NamedTuple):
    """The compiled functions, of jobs that several threads may share; see ``llvm.jobs``.

    Attributes:
        split: its parts are blocks of tokens. First arguments: the addresses of the inputs and of
            the pieces, then tokens, steps, and the numbers from one token's inputs to the next's.
        multiply: its parts are panels. First arguments: the addresses of the weights, of the pieces
            and of the result ``[blocks * ROWS, stride]``, then blocks, steps, the steps from one
            panel to the next, stride, and 1 if the result is overwritten, 0 if it is added to.
    """

    split: Function
    multiply: Function


@functools.cache
def compiled() -> AmxKernel | None:
    """The kernel; None without ``llvmlite``, or if this process may not use such units."""
    compiler = host_compiler()
    if compiler is None or not (compiler.features.get("amx-bf16") and permitted()):
        return None
    module = compiler.compile(_source())
    return AmxKernel(module.function("split"), module.function("multiply"))


@functools.cache
def permitted() -> bool:
    """Asks Linux for the units' state, for all threads of this process."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(*_REQUEST) == 0)


def _source() -> str:
    """The kernel in LLVM's language."""
    settings = bytearray(64)
    settings[0] = 1  # the palette
    for tile in range(8):
        settings[16 + 2 * tile] = 64  # bytes of a row
        settings[48 + tile] = ROWS
    text = "".join(f"\\{byte:02x}" for byte in settings)
    return "\n".join(
        [
            f'@settings = internal constant [64 x i8] c"{text}", align 64',
            "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
            DECLARATIONS,
            "declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)",
            _blocks(1),
            _blocks(2),
            _multiply(),
            _split(),
        ]
    )


def _blocks(blocks: int) -> str:
    """A function that multiplies one or two blocks of tokens by a panel.

    The sums of a block are the tiles 2 * block and 2 * block + 1, the weights the tiles 4 and 5.
    """
    lines = [
        f"define internal void @blocks_{blocks}(ptr %w, ptr %x0, ptr %y0, i64 %steps, "
        "i64 %stride, i1 %first) {",
        "entry:",
        "%row = mul i64 %stride, 4",
        f"%block = mul i64 %row, {ROWS}",
        f"%pieces = mul i64 %steps, {PIECES * TILE_BYTES}",
        "%y1 = getelementptr i8, ptr %y0, i64 %block",
        "%x1 = getelementptr i8, ptr %x0, i64 %pieces",
    ]
    sums = [(block, half) for block in range(blocks) for half in range(2)]
    for block, half in sums:
        lines.append(f"%s{block}{half} = getelementptr i8, ptr %y{block}, i64 {64 * half}")
    lines += ["br i1 %first, label %clear, label %load", "clear:"]
    lines += [f"call void @llvm.x86.tilezero(i8 {2 * block + half})" for block, half in sums]
    lines += ["br label %loop", "load:"]
    lines += [
        f"call void @llvm.x86.tileloadd64(i8 {2 * block + half}, ptr %s{block}{half}, i64 %row)"
        for block, half in sums
    ]
    lines += [
        "br label %loop",
        "loop:",
        "%step = phi i64 [0, %clear], [0, %load], [%next, %loop]",
        f"%wo = mul i64 %step, {2 * TILE_BYTES}",
        "%w0 = getelementptr i8, ptr %w, i64 %wo",
        f"%w1 = getelementptr i8, ptr %w0, i64 {TILE_BYTES}",
        f"%po = mul i64 %step, {PIECES * TILE_BYTES}",
        "call void @llvm.x86.tileloadd64(i8 4, ptr %w0, i64 64)",
        "call void @llvm.x86.tileloadd64(i8 5, ptr %w1, i64 64)",
    ]
    for line in range(2 * TILE_BYTES // LINE_BYTES):
        ahead = _AHEAD * 2 * TILE_BYTES + line * LINE_BYTES
        lines += [
            f"%f{line} = getelementptr i8, ptr %w0, i64 {ahead}",
            f"call void @llvm.prefetch.p0(ptr %f{line}, i32 0, i32 {_CACHE[blocks]}, i32 1)",
        ]
    for block in range(blocks):
        lines.append(f"%p{block} = getelementptr i8, ptr %x{block}, i64 %po")
    for number, (piece, block) in enumerate((p, b) for p in range(PIECES) for b in range(blocks)):
        tile = 6 + number % 2
        lines += [
            f"%a{piece}{block} = getelementptr i8, ptr %p{block}, i64 {TILE_BYTES * piece}",
            f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr %a{piece}{block}, i64 64)",
        ]
        lines += [
            f"call void @llvm.x86.tdpbf16ps(i8 {2 * block + half}, i8 {tile}, i8 {4 + half})"
            for half in range(2)
        ]
    lines += [
        "%next = add i64 %step, 1",
        "%more = icmp ult i64 %next, %steps",
        "br i1 %more, label %loop, label %end",
        "end:",
    ]
    lines += [
        f"call void @llvm.x86.tilestored64(i8 {2 * block + half}, ptr %s{block}{half}, i64 %row)"
        for block, half in sums
    ]
    return "\n".join([*lines, "ret void", "}"])


def _multiply() -> str:
    arguments = (
        "ptr %w, ptr %x, ptr %y, i64 %blocks, i64 %steps, i64 %panel_steps, i64 %stride, i64 %clear"
    )
    body = f"""
  %first = icmp ne i64 %clear, 0
  %panel = mul i64 %panel_steps, {2 * TILE_BYTES}
  %wo = mul i64 %part, %panel
  %wp = getelementptr i8, ptr %w, i64 %wo
  %yo = mul i64 %part, {4 * OUTPUTS}
  %yp = getelementptr i8, ptr %y, i64 %yo
  %pieces = mul i64 %steps, {PIECES * TILE_BYTES}
  %sums = mul i64 %stride, {4 * ROWS}
  br label %tokens
tokens:
  %t = phi i64 [0, %work], [%t_next, %tokens_end]
  %xo = mul i64 %t, %pieces
  %xt = getelementptr i8, ptr %x, i64 %xo
  %to = mul i64 %t, %sums
  %yt = getelementptr i8, ptr %yp, i64 %to
  %left = sub i64 %blocks, %t
  %pair = icmp uge i64 %left, 2
  br i1 %pair, label %two, label %one
two:
  call void @blocks_2(ptr %wp, ptr %xt, ptr %yt, i64 %steps, i64 %stride, i1 %first)
  br label %tokens_end
one:
  call void @blocks_1(ptr %wp, ptr %xt, ptr %yt, i64 %steps, i64 %stride, i1 %first)
  br label %tokens_end
tokens_end:
  %t_next = add i64 %t, 2
  %t_more = icmp ult i64 %t_next, %blocks
  br i1 %t_more, label %tokens, label %part_end
"""
    begin = "call void @llvm.x86.ldtilecfg(ptr @settings)"
    return shared("multiply", arguments, body, begin, end="call void @llvm.x86.tilerelease()")


def _split() -> str:
    """The function that writes pieces: each holds the next eight bits of a number.

    The first is the number's upper half, the second that of what the first leaves, and so on.
    """
    vector, integers, half = "<16 x float>", "<16 x i32>", "<16 x i16>"
    upper = ", ".join(["i32 -65536"] * 16)
    shift = ", ".join(["i32 16"] * 16)
    lines = []
    for part in range(2):
        lines += [
            f"%xp{part} = getelementptr float, ptr %xs, i64 {16 * part}",
            f"%v{part}0 = load {vector}, ptr %xp{part}, align 4",
        ]
        for piece in range(PIECES):
            name = f"{part}{piece}"
            lines += [
                f"%b{name} = bitcast {vector} %v{name} to {integers}",
                f"%h{name} = lshr {integers} %b{name}, <{shift}>",
                f"%n{name} = trunc {integers} %h{name} to {half}",
                f"%p{name} = getelementptr i8, ptr %ps, i64 {TILE_BYTES * piece + 32 * part}",
                f"store {half} %n{name}, ptr %p{name}, align 2",
                f"%m{name} = and {integers} %b{name}, <{upper}>",
                f"%f{name} = bitcast {integers} %m{name} to {vector}",
                f"%v{part}{piece + 1} = fsub {vector} %v{name}, %f{name}",
            ]
    inner = "\n".join(lines)
    body = f"""
  %begin = mul i64 %part, {ROWS}
  %left = sub i64 %tokens, %begin
  %whole = icmp uge i64 %left, {ROWS}
  %rows = select i1 %whole, i64 {ROWS}, i64 %left
  %xo = mul i64 %begin, %stride
  %xb = getelementptr float, ptr %x, i64 %xo
  %size = mul i64 %steps, {PIECES * TILE_BYTES}
  %po = mul i64 %part, %size
  %pb = getelementptr i8, ptr %p, i64 %po
  br label %tokens_loop
tokens_loop:
  %row = phi i64 [0, %work], [%row_next, %row_end]
  %ro = mul i64 %row, %stride
  %xr = getelementptr float, ptr %xb, i64 %ro
  %rb = mul i64 %row, 64
  %pr = getelementptr i8, ptr %pb, i64 %rb
  br label %steps_loop
steps_loop:
  %s = phi i64 [0, %tokens_loop], [%s_next, %steps_loop]
  %so = mul i64 %s, {INPUTS}
  %xs = getelementptr float, ptr %xr, i64 %so
  %sb = mul i64 %s, {PIECES * TILE_BYTES}
  %ps = getelementptr i8, ptr %pr, i64 %sb
{inner}
  %s_next = add i64 %s, 1
  %s_more = icmp ult i64 %s_next, %steps
  br i1 %s_more, label %steps_loop, label %row_end
row_end:
  %row_next = add i64 %row, 1
  %row_more = icmp ult i64 %row_next, %rows
  br i1 %row_more, label %tokens_loop, label %part_end
"""
    return shared("split", "ptr %x, ptr %p, i64 %tokens, i64 %steps, i64 %stride", body)
