"""Tokens as whole numbers of digits, in LLVM's language; see ``llvm.dot``.

A token's record of a group of inputs: its scale and the sum of its numbers, in float32, then the
upper digits of all inputs, the middle ones and the lower ones, in 8 bits each. A number is its
digits, in base 256, times the scale. Both scale and sum are NaN if a number is infinite or NaN.
"""

from __future__ import annotations

from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import number, splat, spread

DIGITS = 3
# Bytes before the digits in a record.
HEAD_BYTES = 8
# The largest whole number: its upper digit is 127. And the smallest number for which the largest of
# a group counts, so that its scale is a normal float32 number.
LARGEST, SMALLEST = 127.0 * 65536, 2.0**-100


def token_bytes(inputs: int, group: int) -> int:
    """The bytes of a token's records."""
    return inputs // group * (HEAD_BYTES + DIGITS * group)


def digits(lanes: int) -> str:
    """The function ``digits`` of ``llvm.dot.DotKernel``, for registers of ``lanes`` numbers."""
    body = f"""
  %size = mul i64 %group, {DIGITS}
  %record = add i64 %size, {HEAD_BYTES}
  %inputs = mul i64 %groups, %group
  %xo = mul i64 %part, %inputs
  %xt = getelementptr float, ptr %x, i64 %xo
  %token = mul i64 %groups, %record
  %ro = mul i64 %part, %token
  %rt = getelementptr i8, ptr %records, i64 %ro
  br label %groups_loop
groups_loop:
  %g = phi i64 [0, %work], [%g_next, %group_end]
  %go = mul i64 %g, %group
  %xg = getelementptr float, ptr %xt, i64 %go
  %so = mul i64 %g, %record
  %rg = getelementptr i8, ptr %rt, i64 %so
  %upper = getelementptr i8, ptr %rg, i64 {HEAD_BYTES}
  %middle = getelementptr i8, ptr %upper, i64 %group
  %lower = getelementptr i8, ptr %middle, i64 %group
  br label %largest
{_scale(lanes)}
{_digits(lanes)}
group_end:
  %sum = call i32 @llvm.vector.reduce.add.v{lanes}i32(<{lanes} x i32> %sums_next)
  %sum_float = sitofp i32 %sum to float
  %sum_scaled = fmul float %sum_float, %factor
  %sp = getelementptr float, ptr %rg, i64 1
  store float %sum_scaled, ptr %sp, align 4
  %g_next = add i64 %g, 1
  %g_more = icmp ult i64 %g_next, %groups
  br i1 %g_more, label %groups_loop, label %part_end
"""
    function = shared("digits", "ptr %x, ptr %records, i64 %groups, i64 %group", body)
    return f"{_rounding(lanes)}\n{function}"


def _scale(lanes: int) -> str:
    """Finds the largest number of a group, and writes the scale that makes whole numbers of all."""
    floats = f"<{lanes} x float>"
    return f"""largest:
  %i = phi i64 [0, %groups_loop], [%i_next, %largest]
  %most = phi {floats} [zeroinitializer, %groups_loop], [%most_next, %largest]
  %odd = phi {floats} [zeroinitializer, %groups_loop], [%odd_next, %largest]
  %xp = getelementptr float, ptr %xg, i64 %i
  %v = load {floats}, ptr %xp, align 4
  %size_of = call {floats} @llvm.fabs.v{lanes}f32({floats} %v)
  %more = fcmp ogt {floats} %size_of, %most
  %most_next = select <{lanes} x i1> %more, {floats} %size_of, {floats} %most
  %odd_next = call {floats} @llvm.fma.v{lanes}f32({floats} %v, {floats} zeroinitializer,
    {floats} %odd)
  %i_next = add i64 %i, {lanes}
  %i_more = icmp ult i64 %i_next, %group
  br i1 %i_more, label %largest, label %scale
scale:
  %max = call nnan float @llvm.vector.reduce.fmax.v{lanes}f32({floats} %most_next)
  %nan = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, {floats} %odd_next)
  %tiny = fcmp olt float %max, {number(SMALLEST)}
  %top = select i1 %tiny, float {number(SMALLEST)}, float %max
  %unit = fmul float %top, {number(1 / LARGEST)}
  %units = fdiv float {number(LARGEST)}, %top
  {spread("%units_all", "%units", lanes)}
  %factor = fadd float %unit, %nan
  store float %factor, ptr %rg, align 4
  br label %numbers"""


def _digits(lanes: int) -> str:
    """Rounds the scaled numbers of a group, and writes their digits."""
    floats, integers, octets = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{lanes} x i8>"
    half, shift = (splat(value, lanes, "i32") for value in (128, 8))
    return f"""numbers:
  %n = phi i64 [0, %scale], [%n_next, %numbers]
  %sums = phi {integers} [zeroinitializer, %scale], [%sums_next, %numbers]
  %np = getelementptr float, ptr %xg, i64 %n
  %nv = load {floats}, ptr %np, align 4
  %scaled = fmul {floats} %nv, %units_all
  %whole = {_rounded(lanes, "%scaled")}
  %sums_next = add {integers} %sums, %whole
  %whole_half = add {integers} %whole, {half}
  %mid = ashr {integers} %whole_half, {shift}
  %mid_half = add {integers} %mid, {half}
  %high = ashr {integers} %mid_half, {shift}
  %h_bytes = trunc {integers} %high to {octets}
  %m_bytes = trunc {integers} %mid to {octets}
  %l_bytes = trunc {integers} %whole to {octets}
  %hp = getelementptr i8, ptr %upper, i64 %n
  %mp = getelementptr i8, ptr %middle, i64 %n
  %lp = getelementptr i8, ptr %lower, i64 %n
  store {octets} %h_bytes, ptr %hp, align 1
  store {octets} %m_bytes, ptr %mp, align 1
  store {octets} %l_bytes, ptr %lp, align 1
  %n_next = add i64 %n, {lanes}
  %n_more = icmp ult i64 %n_next, %group
  br i1 %n_more, label %numbers, label %group_end"""


def _rounding(lanes: int) -> str:
    """Declares what ``_rounded`` calls."""
    more = "<16 x i32>, i16, i32" if lanes == 16 else ""
    arguments = ", ".join(filter(None, [f"<{lanes} x float>", more]))
    return f"declare <{lanes} x i32> @{_rounding_name(lanes)}({arguments})"


def _rounded(lanes: int, numbers: str) -> str:
    """Rounds float32 numbers to whole numbers; what NaN or infinity give is arbitrary."""
    more = "<16 x i32> zeroinitializer, i16 -1, i32 4" if lanes == 16 else ""
    arguments = ", ".join(filter(None, [f"<{lanes} x float> {numbers}", more]))
    return f"call <{lanes} x i32> @{_rounding_name(lanes)}({arguments})"


def _rounding_name(lanes: int) -> str:
    return "llvm.x86.avx512.mask.cvtps2dq.512" if lanes == 16 else "llvm.x86.avx.cvt.ps2dq.256"
