"""Products with quantized weights, in LLVM's language; see ``llvm.kernel``.

A panel of quantized weights is one record for each group of inputs: the scales of the panel's
outputs, their biases, in float32, and for each input of the group the outputs' codes, in 4 bits or
8. A weight is ``code * scale + bias``, computed in a register, so that memory is read in the size
of the codes. 4 bits: the low halves of an input's bytes are the first outputs' codes.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.tiles import tile

# The bits of a code, by kind.
BITS = {"nibble": 4, "byte": 8}


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
    if kind == "nibble":
        low, up = (", ".join([f"i32 {number}"] * lanes) for number in (15, 4))
        lines += [
            f"%c = load {codes}, ptr %ci, align 1",
            f"%e = zext {codes} %c to {integers}",
            f"%q0 = and {integers} %e, <{low}>",
            f"%q1 = lshr {integers} %e, <{up}>",
        ]
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
