"""Blocks of tokens multiplied by a panel of codes by Intel's matrix units, in LLVM's language.

The units multiply tiles of bytes, and add the products to tiles of whole numbers. These are the
same numbers that ``llvm.dot_tiles`` computes, and the scales are applied to them by the same
operations in the same order. So a token's product is identical to the last bit whether it is
multiplied here or there. While the units multiply a group by half of a panel's outputs, the sums of
the half before it are scaled.

Tiles 0 to 5 are sums ``[registers of outputs, digits]`` of up to 16 tokens and 16 outputs each,
tile 6 has codes ``[quads of inputs, outputs, 4]``, and tile 7 digits ``[tokens, inputs]``.

Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and
volume 2, TDPBSUD.
"""

from __future__ import annotations

from chairlift.engine.cpu.compiled.llvm.amx import ROWS
from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.digits import DIGITS, HEAD_BYTES
from chairlift.engine.cpu.compiled.llvm.dot_tiles import QUAD, broadcast, numbers, scaled
from chairlift.engine.cpu.compiled.llvm.quantized import BITS

# ``llvm.dot_tiles`` multiplies fewer tokens faster.
LEAST_TOKENS = 6
# Outputs and bytes of a tile's row, and the most inputs that it has.
_LANES, _ROW_BYTES, _INPUTS = 16, 64, 64
# The most inputs of a group; see ``quantized_weight``.
_MOST_INPUTS = 128
_CODES, _NUMBERS = 6, 7
# Bytes of a quad of codes, and of a record's scales and biases.
_LINE, _HEAD = WIDE * _LANES * QUAD, WIDE * _LANES * 8


def functions(kind: str) -> str:
    """The function ``dot_{kind}_block``, and those of this kind that it calls.

    It multiplies a block of at most 16 tokens by a panel. ``configure_tiles`` was called for these
    tokens. Its arguments are those of ``dot_tiles.dot_tile``, and the tokens.
    """
    products = [_multiply(kind, wide) for wide in range(WIDE)]
    return "\n".join([*([_unpack(kind)] if BITS[kind] == 4 else []), _block(kind), *products])


def shared_functions() -> str:
    """Functions of all kinds."""
    product = "declare void @llvm.x86.tdpbsud(i8 immarg, i8 immarg, i8 immarg)"
    return "\n".join([product, _configure(), _scale()])


def _configure() -> str:
    """A function that sets the tiles' sizes for the tokens of a block and the inputs of a group."""
    lines = [
        "define internal void @configure_tiles(i64 %tokens, i64 %group) {",
        "entry:",
        "%settings = alloca [64 x i8], align 64",
        "store <64 x i8> zeroinitializer, ptr %settings, align 64",
        "store i8 1, ptr %settings, align 1",  # the palette
        "%rows = trunc i64 %tokens to i8",
        f"%whole = icmp uge i64 %group, {_INPUTS}",
        f"%inputs.64 = select i1 %whole, i64 {_INPUTS}, i64 %group",
        "%inputs = trunc i64 %inputs.64 to i8",
        f"%quads = udiv i8 %inputs, {QUAD}",
    ]
    for tile in range(8):
        width = "%inputs" if tile == _NUMBERS else str(_ROW_BYTES)
        height = "%quads" if tile == _CODES else "%rows"
        for name, at, number in (("w", 16 + 2 * tile, width), ("h", 48 + tile, height)):
            lines += [
                f"%{name}{tile} = getelementptr i8, ptr %settings, i64 {at}",
                f"store i8 {number}, ptr %{name}{tile}, align 1",
            ]
    return "\n".join([*lines, "call void @llvm.x86.ldtilecfg(ptr %settings)", "ret void", "}"])


def _block(kind: str) -> str:
    """While the units multiply a group by half of the outputs, the half before it is scaled.

    For each group: multiply it by the second half, and store and scale what was begun before; then
    multiply the next group by the first half, and do the same; last, unpack the group after next.
    """
    lines = [
        f"define internal void @dot_{kind}_block(ptr %w, ptr %x, ptr %y, i64 %groups, "
        "i64 %record, i64 %units, i64 %group, i64 %token, i64 %stride, i64 %tokens) {",
        "entry:",
        f"%digits = mul i64 %group, {DIGITS}",
        f"%step = add i64 %digits, {HEAD_BYTES}",
        "%last = sub i64 %groups, 1",
        *_memory(),
        *_first_groups(kind),
        *_groups_loop(kind),
        "finish:",
        "call void @scale_tokens(i64 1, ptr %at, ptr %xg, ptr %tiles1, ptr %sums1, "
        "i64 %tokens, i64 %token)",
        "br label %write",
        *_write(),
        "ret void",
        "}",
    ]
    return "\n".join(lines)


def _memory() -> list[str]:
    """Memory for the unpacked codes of two groups, and the sums, which start at 0, of each half."""
    lines = [
        f"%bytes.{number} = alloca [{_MOST_INPUTS // QUAD * _LINE} x i8], align 64"
        for number in range(2)
    ]
    for wide in range(WIDE):
        lines += [
            f"%tiles{wide} = alloca [{DIGITS * ROWS * _LANES} x i32], align 64",
            f"%sums{wide} = alloca [{ROWS * _LANES} x float], align 64",
            f"store [{ROWS} x <{_LANES} x float>] zeroinitializer, ptr %sums{wide}, align 64",
        ]
    return lines


def _first_groups(kind: str) -> list[str]:
    """Unpacks the first two groups, and multiplies the first one by the first half."""
    return [
        *_codes_at(kind, "%w", "%bytes.0", "0"),
        "%w.1 = getelementptr i8, ptr %w, i64 %record",
        "%some = icmp ne i64 %last, 0",
        "%w.second = select i1 %some, ptr %w.1, ptr %w",
        *_codes_at(kind, "%w.second", "%bytes.1", "1"),
        f"call void @multiply_{kind}_0(ptr %codes0, ptr %x, i64 %group, i64 %token)",
        "br label %groups_loop",
    ]


def _groups_loop(kind: str) -> list[str]:
    """The loop over the groups, up to a jump to ``finish``; see ``_block``."""
    return [
        "groups_loop:",
        "%g = phi i64 [0, %entry], [%g_next, %group_end]",
        "%at = phi ptr [%w, %entry], [%at_next, %group_end]",
        "%at_before = phi ptr [%w, %entry], [%at, %group_end]",
        "%xg = phi ptr [%x, %entry], [%xg_next, %group_end]",
        "%xg_before = phi ptr [%x, %entry], [%xg, %group_end]",
        "%codes = phi ptr [%codes0, %entry], [%codes_next, %group_end]",
        "%codes_next = phi ptr [%codes1, %entry], [%codes_third, %group_end]",
        "%at_next = getelementptr i8, ptr %at, i64 %record",
        "%xg_next = getelementptr i8, ptr %xg, i64 %step",
        "%g_next = add i64 %g, 1",
        "%more = icmp ult i64 %g, %last",
        f"call void @multiply_{kind}_1(ptr %codes, ptr %xg, i64 %group, i64 %token)",
        *_store(0),
        "%is_first = icmp eq i64 %g, 0",
        "br i1 %is_first, label %ahead, label %scale_before",
        "scale_before:",
        "call void @scale_tokens(i64 1, ptr %at_before, ptr %xg_before, ptr %tiles1, ptr %sums1, "
        "i64 %tokens, i64 %token)",
        "br label %ahead",
        "ahead:",
        "br i1 %more, label %multiply_next, label %scale_own",
        "multiply_next:",
        f"call void @multiply_{kind}_0(ptr %codes_next, ptr %xg_next, i64 %group, i64 %token)",
        "br label %scale_own",
        "scale_own:",
        *_store(1),
        "call void @scale_tokens(i64 0, ptr %at, ptr %xg, ptr %tiles0, ptr %sums0, "
        "i64 %tokens, i64 %token)",
        "%at_third = getelementptr i8, ptr %at_next, i64 %record",
        *_third_group(kind),
        "br label %group_end",
        "group_end:",
        "br i1 %more, label %groups_loop, label %finish",
    ]


def _third_group(kind: str) -> list[str]:
    """Unpacks the group after next, if there is one, where the codes of this group were."""
    if BITS[kind] != 4:
        return [f"%codes_third = getelementptr i8, ptr %at_third, i64 {_HEAD}"]
    return [
        "%g_third = add i64 %g, 2",
        "%any = icmp ule i64 %g_third, %last",
        "%codes_third = bitcast ptr %codes to ptr",
        "br i1 %any, label %unpack, label %group_end",
        "unpack:",
        f"%packed_third = getelementptr i8, ptr %at_third, i64 {_HEAD}",
        f"call void @unpack_{kind}(ptr %packed_third, ptr %codes_third, i64 %units)",
    ]


def _write() -> list[str]:
    """Writes the sums of all tokens to the result."""
    floats = f"<{_LANES} x float>"
    lines = [
        "write:",
        "%t = phi i64 [0, %finish], [%t_next, %write]",
        "%yo = mul i64 %t, %stride",
        "%yp = getelementptr float, ptr %y, i64 %yo",
    ]
    for wide in range(WIDE):
        lines += [
            f"%sp{wide} = getelementptr {floats}, ptr %sums{wide}, i64 %t",
            f"%s{wide} = load {floats}, ptr %sp{wide}, align 64",
            f"%yp{wide} = getelementptr {floats}, ptr %yp, i64 {wide}",
            f"store {floats} %s{wide}, ptr %yp{wide}, align 4",
        ]
    return [
        *lines,
        "%t_next = add i64 %t, 1",
        "%t_more = icmp ult i64 %t_next, %tokens",
        "br i1 %t_more, label %write, label %end",
        "end:",
    ]


def _codes_at(kind: str, record: str, buffer: str, name: str) -> list[str]:
    """Computes the address ``%codes{name}`` of a record's codes, a byte each."""
    packed = f"getelementptr i8, ptr {record}, i64 {_HEAD}"
    if BITS[kind] != 4:
        return [f"%codes{name} = {packed}"]
    return [
        f"%packed{name} = {packed}",
        f"call void @unpack_{kind}(ptr %packed{name}, ptr {buffer}, i64 %units)",
        f"%codes{name} = bitcast ptr {buffer} to ptr",
    ]


def _store(wide: int) -> list[str]:
    """Stores the sums of half of the outputs."""
    lines = []
    for digit in range(DIGITS):
        lines += [
            f"%stp{wide}{digit} = getelementptr i32, ptr %tiles{wide}, i64 {ROWS * _LANES * digit}",
            f"call void @llvm.x86.tilestored64(i8 {DIGITS * wide + digit}, "
            f"ptr %stp{wide}{digit}, i64 {_ROW_BYTES})",
        ]
    return lines


def _multiply(kind: str, wide: int) -> str:
    """A function that multiplies the digits of a group by the codes of half of the outputs."""
    lines = [
        f"define internal void @multiply_{kind}_{wide}(ptr %codes, ptr %x, i64 %group, "
        "i64 %token) {",
        "entry:",
    ]
    lines += [
        f"call void @llvm.x86.tilezero(i8 {DIGITS * wide + digit})" for digit in range(DIGITS)
    ]
    lines += [
        "br label %chunks",
        "chunks:",
        "%k = phi i64 [0, %entry], [%k_next, %chunks]",
        f"%line = mul i64 %k, {_LINE // QUAD}",
        f"%place = add i64 %line, {_LANES * QUAD * wide}",
        "%cp = getelementptr i8, ptr %codes, i64 %place",
        f"%digit0 = add i64 %k, {HEAD_BYTES}",
        f"call void @llvm.x86.tileloadd64(i8 {_CODES}, ptr %cp, i64 {_LINE})",
    ]
    for digit in range(DIGITS):
        lines += [
            f"%dp{digit} = getelementptr i8, ptr %x, i64 %digit{digit}",
            f"call void @llvm.x86.tileloadd64(i8 {_NUMBERS}, ptr %dp{digit}, i64 %token)",
            f"call void @llvm.x86.tdpbsud(i8 {DIGITS * wide + digit}, i8 {_NUMBERS}, i8 {_CODES})",
            f"%digit{digit + 1} = add i64 %digit{digit}, %group",
        ]
    lines += [
        f"%k_next = add i64 %k, {_INPUTS}",
        "%k_more = icmp ult i64 %k_next, %group",
        "br i1 %k_more, label %chunks, label %end",
        "end:",
        "ret void",
        "}",
    ]
    return "\n".join(lines)


def _scale() -> str:
    """A function that applies scales to the sums of a group and half of the outputs."""
    floats, integers = f"<{_LANES} x float>", f"<{_LANES} x i32>"
    lines = [
        "define internal void @scale_tokens(i64 %wide, ptr %at, ptr %x, ptr %tiles, ptr %sums, "
        "i64 %tokens, i64 %token) {",
        "entry:",
        f"%sp = getelementptr {floats}, ptr %at, i64 %wide",
        f"%scale = load {floats}, ptr %sp, align 4",
        f"%bp = getelementptr {floats}, ptr %sp, i64 {WIDE}",
        f"%bias = load {floats}, ptr %bp, align 4",
        "br label %loop",
        "loop:",
        "%t = phi i64 [0, %entry], [%t_next, %loop]",
        "%xp = phi ptr [%x, %entry], [%xp_next, %loop]",
        *broadcast("factor", _LANES, "float", "%xp"),
        "%tp = getelementptr float, ptr %xp, i64 1",
        *broadcast("total", _LANES, "float", "%tp"),
        f"%ip0 = getelementptr {integers}, ptr %tiles, i64 %t",
        f"%ip1 = getelementptr {integers}, ptr %ip0, i64 {ROWS}",
        f"%ip2 = getelementptr {integers}, ptr %ip0, i64 {2 * ROWS}",
        *(f"%i{n} = load {integers}, ptr %ip{n}, align 64" for n in range(DIGITS)),
        f"%ap = getelementptr {floats}, ptr %sums, i64 %t",
        f"%a = load {floats}, ptr %ap, align 64",
        *scaled(
            "", _LANES, ["%i0", "%i1", "%i2"], ("%factor", "%total"), ("%scale", "%bias"), "%a"
        ),
        f"store {floats} %n, ptr %ap, align 64",
        "%xp_next = getelementptr i8, ptr %xp, i64 %token",
        "%t_next = add i64 %t, 1",
        "%t_more = icmp ult i64 %t_next, %tokens",
        "br i1 %t_more, label %loop, label %end",
        "end:",
        "ret void",
        "}",
    ]
    return "\n".join(lines)


def _unpack(kind: str) -> str:
    """A function that unpacks a group's codes of 4 bits to the numbers to multiply, as bytes."""
    octets = f"<{_ROW_BYTES} x i8>"
    low, up = (", ".join([f"i8 {number}"] * _ROW_BYTES) for number in (15, 4))
    lines = []
    for wide in range(WIDE):
        first, second = wide, WIDE + wide
        lines += [
            f"%from{wide} = getelementptr {octets}, ptr %line, i64 {wide}",
            f"%both{wide} = load {octets}, ptr %from{wide}, align 1",
            f"%code{first} = and {octets} %both{wide}, <{low}>",
            f"%code{second} = lshr {octets} %both{wide}, <{up}>",
        ]
    for number in range(2 * WIDE):
        lines += [
            f"%number{number} = {numbers(kind, _LANES, f'%code{number}')}",
            f"%to{number} = getelementptr {octets}, ptr %to, i64 {number}",
            f"store {octets} %number{number}, ptr %to{number}, align 64",
        ]
    body = "\n  ".join(lines)
    return f"""
define internal void @unpack_{kind}(ptr %packed, ptr %bytes, i64 %units) {{
entry:
  br label %loop
loop:
  %u = phi i64 [0, %entry], [%u_next, %loop]
  %line.bytes = mul i64 %u, {_LINE}
  %line = getelementptr i8, ptr %packed, i64 %line.bytes
  %to.bytes = mul i64 %u, {2 * _LINE}
  %to = getelementptr i8, ptr %bytes, i64 %to.bytes
  {body}
  %u_next = add i64 %u, 1
  %u_more = icmp ult i64 %u_next, %units
  br i1 %u_more, label %loop, label %end
end:
  ret void
}}
"""
