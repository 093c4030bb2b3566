"""Tiles in LLVM's language: one panel of codes, multiplied by the digits of some tokens.

See ``llvm.dot``, which has the layouts of both.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.digits import DIGITS, HEAD_BYTES
from chairlift.engine.cpu.compiled.llvm.lanes import splat, spread
from chairlift.engine.cpu.compiled.llvm.quantized import E2M1

# Codes of so many bytes ahead are prefetched to the L2 cache: few tokens wait for their memory.
_AHEAD = 4096
# Inputs that one instruction multiplies for each output, and quads of them in a register of codes.
QUAD, QUADS = 4, {"nibble": 2, "byte": 1, "e2m1": 2}


def dot_name(lanes: int) -> str:
    """The instruction for registers of so many numbers of 32 bits."""
    return f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"


def dot_tile(kind: str, lanes: int, tokens: int) -> str:
    """A function that multiplies some tokens by one panel.

    Its arguments are the addresses of the panel, of the first token's records and of its results;
    the groups of inputs, the bytes of a record of the panel, the units of a group (see ``QUADS``),
    the inputs of a group, the bytes of a token's records, and the stride of the results.
    """
    floats = f"<{lanes} x float>"
    results = [(token, wide) for token in range(tokens) for wide in range(WIDE)]
    lines = [
        f"define internal void @dot_{kind}_{tokens}(ptr %w, ptr %x, ptr %y, i64 %groups, "
        "i64 %record, i64 %units, i64 %group, i64 %token, i64 %stride) {",
        "entry:",
        f"%digits = mul i64 %group, {DIGITS}",
        f"%step = add i64 %digits, {HEAD_BYTES}",
    ]
    for token in range(tokens):
        lines += [
            f"%xo{token} = mul i64 %token, {token}",
            f"%x{token} = getelementptr i8, ptr %x, i64 %xo{token}",
            f"%yo{token} = mul i64 %stride, {token}",
            f"%y{token} = getelementptr float, ptr %y, i64 %yo{token}",
        ]
    lines += [
        "br label %groups_loop",
        "groups_loop:",
        "%g = phi i64 [0, %entry], [%g_next, %group_end]",
        "%at = phi ptr [%w, %entry], [%at_next, %group_end]",
        "%xg = phi i64 [0, %entry], [%xg_next, %group_end]",
    ]
    for token, wide in results:
        name = f"{token}_{wide}"
        lines.append(f"%s{name} = phi {floats} [zeroinitializer, %entry], [%n{name}, %group_end]")
    lines += [
        f"%codes = getelementptr i8, ptr %at, i64 {WIDE * lanes * 8}",
        *_units(kind, lanes, tokens),
        "group_end:",
        *_scaled_group(kind, lanes, tokens),
        "%g_next = add i64 %g, 1",
        "%at_next = getelementptr i8, ptr %at, i64 %record",
        "%xg_next = add i64 %xg, %step",
        "%g_more = icmp ult i64 %g_next, %groups",
        "br i1 %g_more, label %groups_loop, label %end",
        "end:",
    ]
    for token, wide in results:
        name = f"{token}_{wide}"
        lines += [
            f"%yp{name} = getelementptr {floats}, ptr %y{token}, i64 {wide}",
            f"store {floats} %n{name}, ptr %yp{name}, align 4",
        ]
    return "\n".join([*lines, "ret void", "}"])


def _scaled_group(kind: str, lanes: int, tokens: int) -> list[str]:
    """Scales the whole sums ``%r`` of a group, and adds them to the sums ``%s``: ``%n``."""
    floats = f"<{lanes} x float>"
    results = [(token, wide) for token in range(tokens) for wide in range(WIDE)]
    last = QUADS[kind] - 1
    lines = []
    for wide in range(WIDE):
        lines += [
            f"%sp{wide} = getelementptr {floats}, ptr %at, i64 {wide}",
            f"%scale{wide} = load {floats}, ptr %sp{wide}, align 4",
            f"%bp{wide} = getelementptr {floats}, ptr %at, i64 {WIDE + wide}",
            f"%bias{wide} = load {floats}, ptr %bp{wide}, align 4",
        ]
    for token in range(tokens):
        lines += [
            *broadcast(f"factor{token}", lanes, "float", f"%xp{token}"),
            f"%tp{token} = getelementptr float, ptr %xp{token}, i64 1",
            *broadcast(f"total{token}", lanes, "float", f"%tp{token}"),
        ]
    for token, wide in results:
        name = f"{token}_{wide}"
        lines += scaled(
            name,
            lanes,
            [f"%r{token}_{digit}_{wide}_{last}" for digit in range(DIGITS)],
            (f"%factor{token}", f"%total{token}"),
            (f"%scale{wide}", f"%bias{wide}"),
            f"%s{name}",
        )
    return lines


def _units(kind: str, lanes: int, tokens: int) -> list[str]:
    """The loop over a group's units, which each register of codes has for some outputs.

    It adds to the sums ``%r``, named by token, digit, register and quad of the unit.
    """
    integers, quads = f"<{lanes} x i32>", QUADS[kind]
    sums = [(t, digit, w) for t in range(tokens) for digit in range(DIGITS) for w in range(WIDE)]
    lines = []
    for token in range(tokens):
        lines += [
            f"%xp{token} = getelementptr i8, ptr %x{token}, i64 %xg",
            f"%d{token}_0 = getelementptr i8, ptr %xp{token}, i64 {HEAD_BYTES}",
        ]
        lines += [
            f"%d{token}_{digit} = getelementptr i8, ptr %d{token}_{digit - 1}, i64 %group"
            for digit in range(1, DIGITS)
        ]
    lines += ["br label %loop", "loop:", "%u = phi i64 [0, %groups_loop], [%u_next, %loop]"]
    for token, digit, wide in sums:
        name = f"{token}_{digit}_{wide}"
        lines.append(
            f"%a{name} = phi {integers} [zeroinitializer, %groups_loop], "
            f"[%r{name}_{quads - 1}, %loop]"
        )
    lines += [f"%co = mul i64 %u, {WIDE * lanes * QUAD}", f"%xu = mul i64 %u, {QUAD * quads}"]
    for wide in range(WIDE):
        lines += [
            f"%cu{wide} = getelementptr i8, ptr %codes, i64 %co",
            f"%cp{wide} = getelementptr {integers}, ptr %cu{wide}, i64 {wide}",
            f"%c{wide} = load {integers}, ptr %cp{wide}, align 1",
            f"%ahead{wide} = getelementptr i8, ptr %cp{wide}, i64 {_AHEAD}",
            f"call void @llvm.prefetch.p0(ptr %ahead{wide}, i32 0, i32 2, i32 1)",
            *_apart(kind, lanes, wide),
        ]
    for quad in range(quads):
        for token, digit in ((t, d) for t in range(tokens) for d in range(DIGITS)):
            name = f"{token}_{digit}_{quad}"
            lines += [
                f"%du{name} = getelementptr i8, ptr %d{token}_{digit}, i64 %xu",
                f"%dq{name} = getelementptr i8, ptr %du{name}, i64 {QUAD * quad}",
                *broadcast(f"v{name}", lanes, "i32", f"%dq{name}"),
            ]
            for wide in range(WIDE):
                one = f"{token}_{digit}_{wide}"
                before = f"%r{one}_{quad - 1}" if quad else f"%a{one}"
                lines.append(
                    f"%r{one}_{quad} = call {integers} @{dot_name(lanes)}({integers} {before}, "
                    f"{integers} %code{wide}_{quad}, {integers} %v{name})"
                )
    return [
        *lines,
        "%u_next = add i64 %u, 1",
        "%u_more = icmp ult i64 %u_next, %units",
        "br i1 %u_more, label %loop, label %group_end",
    ]


def _apart(kind: str, lanes: int, wide: int) -> list[str]:
    """Computes the codes ``%code`` of each quad, in a byte each, from a register ``%c``."""
    integers, octets = f"<{lanes} x i32>", f"<{4 * lanes} x i8>"
    if kind == "byte":
        return [f"%code{wide}_0 = bitcast {integers} %c{wide} to {integers}"]
    low, up = (", ".join([f"i8 {number}"] * (4 * lanes)) for number in (15, 4))
    return [
        f"%o{wide} = bitcast {integers} %c{wide} to {octets}",
        f"%c{wide}_0 = and {octets} %o{wide}, <{low}>",
        f"%c{wide}_1 = lshr {octets} %o{wide}, <{up}>",
        f"%o{wide}_0 = {numbers(kind, lanes, f'%c{wide}_0')}",
        f"%o{wide}_1 = {numbers(kind, lanes, f'%c{wide}_1')}",
        f"%code{wide}_0 = bitcast {octets} %o{wide}_0 to {integers}",
        f"%code{wide}_1 = bitcast {octets} %o{wide}_1 to {integers}",
    ]


def numbers(kind: str, lanes: int, codes: str) -> str:
    """Converts codes of 4 bits, a byte each, to the numbers to multiply; see ``quantized``."""
    octets = f"<{4 * lanes} x i8>"
    if kind != "e2m1":
        return f"bitcast {octets} {codes} to {octets}"
    # The instruction looks up 16 bytes for each 16 bytes.
    table = ", ".join(f"i8 {number}" for number in E2M1 * (lanes // 4))
    return f"call {octets} @{_lookup_name(lanes)}({octets} <{table}>, {octets} {codes})"


def lookup_declaration(lanes: int) -> str:
    """Declares what ``numbers`` calls."""
    octets = f"<{4 * lanes} x i8>"
    return f"declare {octets} @{_lookup_name(lanes)}({octets}, {octets})"


def _lookup_name(lanes: int) -> str:
    return "llvm.x86.avx512.pshuf.b.512" if lanes == 16 else "llvm.x86.avx2.pshuf.b"


def scaled(
    name: str,
    lanes: int,
    digits: Sequence[str],
    token: tuple[str, str],
    weights: tuple[str, str],
    before: str,
) -> list[str]:
    """Computes ``%n{name}``: a register of sums, and the products of a group.

    Args:
        digits: registers of the sums of each digit's products, the upper digit's first.
        token: registers of the token's scale, and of the sum of its numbers.
        weights: registers of the outputs' scales and biases.
        before: the register of the sums of the groups before.
    """
    floats, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    high, middle, low = digits
    (factor, total), (scale, bias) = token, weights
    return [
        f"%m{name} = shl {integers} {middle}, {splat(8, lanes, 'i32')}",
        f"%l{name} = add {integers} %m{name}, {low}",
        f"%lf{name} = sitofp {integers} %l{name} to {floats}",
        f"%hf{name} = sitofp {integers} {high} to {floats}",
        f"%q{name} = {_fma(lanes, f'%hf{name}', splat(65536.0, lanes), f'%lf{name}')}",
        f"%p{name} = fmul {floats} %q{name}, {factor}",
        f"%b{name} = {_fma(lanes, f'%p{name}', scale, before)}",
        f"%n{name} = {_fma(lanes, total, bias, f'%b{name}')}",
    ]


def broadcast(name: str, lanes: int, element: str, address: str) -> list[str]:
    """Loads a number of 32 bits into all lanes of a register ``%name``."""
    return [
        f"%{name}.one = load {element}, ptr {address}, align 4",
        spread(f"%{name}", f"%{name}.one", lanes, element),
    ]


def _fma(lanes: int, a: str, b: str, c: str) -> str:
    floats = f"<{lanes} x float>"
    return f"call {floats} @llvm.fma.v{lanes}f32({floats} {a}, {floats} {b}, {floats} {c})"
