"""Products with quantized weights, in LLVM's language; see ``llvm.kernel``.

A panel of quantized weights is one record for each group of inputs: the scales of the panel's
outputs, their biases, in float32, and for each input of the group the outputs' codes, in 4 bits or
8. A weight is ``code * scale + bias``, computed in a register, so that memory is read in the size
of the codes. 4 bits: the low halves of an input's bytes are the first outputs' codes. For floats of
4 bits, a whole number takes the place of the code; see ``E2M1``.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.lanes import splat
from chairlift.engine.cpu.compiled.llvm.tiles import tile

# The bits of a code, by kind. ``e2m1`` are floats of 4 bits, which the kernels read as whole
# numbers: twice the float, plus 12.
BITS = {"nibble": 4, "byte": 8, "e2m1": 4}
# These numbers for all codes: a bit for the sign, two for the exponent, and one for the fraction.
E2M1 = tuple(12 + sign * twice for sign in (1, -1) for twice in (0, 1, 2, 3, 4, 6, 8, 12))


def record_bytes(kind: str, lanes: int, group: int) -> int:
    """The bytes of a group of inputs in a panel."""
    outputs = WIDE * lanes
    return outputs * 8 + group * outputs * BITS[kind] // 8


def record_size(kind: str, lanes: int) -> str:
    """Computes ``%record``, the same, from ``%group_inputs``."""
    outputs = WIDE * lanes
    return f"""
  %codes = mul i64 %group_inputs, {outputs * BITS[kind] // 8}
  %record = add i64 %codes, {outputs * 8}
"""


def size_of(inputs: str, name: str) -> str:
    """Computes the bytes of some inputs in a panel."""
    groups = f"{name}.groups"
    return f"{groups} = udiv i64 {inputs}, %group_inputs\n  {name} = mul i64 {groups}, %record"


def call_expand(kind: str) -> str:
    """Calls the function of ``expand``."""
    arguments = "ptr %buffer, ptr %wb, i64 %count, i64 %record, i64 %group_inputs"
    return f"call void @{kind}_expand({arguments})"


def expand(kind: str, lanes: int) -> str:
    """A function that writes a block of a panel in float32, as ``llvm.kernel`` multiplies it."""
    vector = f"<{lanes} x float>"
    stores = []
    for wide in range(WIDE):
        stores += [
            f"%to{wide} = getelementptr {vector}, ptr %to, i64 {wide}",
            f"store {vector} %w{wide}, ptr %to{wide}, align 4",
        ]
    lines = [
        f"define internal void @{kind}_expand(ptr %buffer, ptr %w, i64 %count, i64 %step, "
        "i64 %group) {",
        "entry:",
        *_groups(lanes, []),
        *_inputs(kind, lanes, []),
        f"%place = mul i64 %i, {WIDE * lanes}",
        "%to = getelementptr float, ptr %buffer, i64 %place",
        *stores,
        *_ends(kind, lanes),
    ]
    return "\n".join([*lines, "ret void", "}"])


def _groups(lanes: int, sums: Sequence[str]) -> list[str]:
    """Begins a loop over the groups of a block, which carries these sums."""
    vector = f"<{lanes} x float>"
    lines = [
        "br label %groups",
        "groups:",
        "%start = phi i64 [0, %entry], [%stop, %group_end]",
        "%at = phi ptr [%w, %entry], [%after, %group_end]",
    ]
    lines += [
        f"%g{name} = phi {vector} [%b{name}, %entry], [%n{name}, %group_end]" for name in sums
    ]
    for wide in range(WIDE):
        lines += [
            f"%sp{wide} = getelementptr {vector}, ptr %at, i64 {wide}",
            f"%scale{wide} = load {vector}, ptr %sp{wide}, align 4",
            f"%bp{wide} = getelementptr {vector}, ptr %at, i64 {WIDE + wide}",
            f"%bias{wide} = load {vector}, ptr %bp{wide}, align 4",
        ]
    return lines


def _inputs(kind: str, lanes: int, sums: Sequence[str]) -> list[str]:
    """Begins a loop over the inputs of a group; computes the weights ``%w0``, ``%w1`` of one."""
    vector, integers, codes = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{lanes} x i8>"
    lines = [
        f"%codes = getelementptr i8, ptr %at, i64 {WIDE * lanes * 8}",
        "%stop = add i64 %start, %group",
        "%after = getelementptr i8, ptr %at, i64 %step",
        "br label %loop",
        "loop:",
        "%i = phi i64 [%start, %groups], [%next, %loop]",
        "%ci = phi ptr [%codes, %groups], [%cn, %loop]",
    ]
    lines += [f"%s{name} = phi {vector} [%g{name}, %groups], [%n{name}, %loop]" for name in sums]
    if BITS[kind] == 4:
        low, up = (", ".join([f"i32 {number}"] * lanes) for number in (15, 4))
        lines += [
            f"%c = load {codes}, ptr %ci, align 1",
            f"%e = zext {codes} %c to {integers}",
            f"%c0 = and {integers} %e, <{low}>",
            f"%c1 = lshr {integers} %e, <{up}>",
        ]
        for wide in range(WIDE):
            lines += (_float4 if kind == "e2m1" else _same)(lanes, f"%c{wide}", f"%q{wide}")
    else:
        for wide in range(WIDE):
            lines += [
                f"%cp{wide} = getelementptr {codes}, ptr %ci, i64 {wide}",
                f"%c{wide} = load {codes}, ptr %cp{wide}, align 1",
                f"%q{wide} = zext {codes} %c{wide} to {integers}",
            ]
    for wide in range(WIDE):
        lines += [
            f"%f{wide} = sitofp {integers} %q{wide} to {vector}",
            f"%w{wide} = call {vector} @llvm.fma.v{lanes}f32({vector} %f{wide}, "
            f"{vector} %scale{wide}, {vector} %bias{wide})",
        ]
    return lines


def _same(lanes: int, code: str, number: str) -> list[str]:
    return [f"{number} = bitcast <{lanes} x i32> {code} to <{lanes} x i32>"]


def _float4(lanes: int, code: str, number: str) -> list[str]:
    """Computes the numbers of ``E2M1``.

    Without sign they are the code's last three bits ``c``, plus what they exceed 4 by, plus twice
    what they exceed 6 by.
    """
    vector, name = f"<{lanes} x i32>", number

    def all_of(value: int) -> str:
        return splat(value, lanes, "i32")

    def over(least: int) -> str:
        call = f"call {vector} @llvm.usub.sat.v{lanes}i32"
        return f"{name}.{least} = {call}({vector} {name}.c, {vector} {all_of(least)})"

    return [
        f"{name}.c = and {vector} {code}, {all_of(7)}",
        over(4),
        over(6),
        f"{name}.twice = shl {vector} {name}.6, {all_of(1)}",
        f"{name}.sum = add {vector} {name}.c, {name}.4",
        f"{name}.size = add {vector} {name}.sum, {name}.twice",
        f"{name}.less = sub {vector} {all_of(12)}, {name}.size",
        f"{name}.more = add {vector} {all_of(12)}, {name}.size",
        f"{name}.sign = icmp uge {vector} {code}, {all_of(8)}",
        f"{number} = select <{lanes} x i1> {name}.sign, {vector} {name}.less, {vector} {name}.more",
    ]


def _ends(kind: str, lanes: int) -> list[str]:
    """Ends both loops."""
    return [
        "%next = add i64 %i, 1",
        f"%cn = getelementptr i8, ptr %ci, i64 {WIDE * lanes * BITS[kind] // 8}",
        "%more = icmp ult i64 %next, %stop",
        "br i1 %more, label %loop, label %group_end",
        "group_end:",
        "%groups_more = icmp ult i64 %stop, %count",
        "br i1 %groups_more, label %groups, label %end",
        "end:",
    ]


def quantized_tile(kind: str, lanes: int, tokens: int) -> str:
    """A tile of quantized weights; ``step`` is the size of a record, then come a group's inputs."""

    def begin(sums: Sequence[str]) -> list[str]:
        return [*_groups(lanes, sums), *_inputs(kind, lanes, sums)]

    return tile(kind, lanes, tokens, begin, _ends(kind, lanes), more=", i64 %group")
