"""Tokens as whole numbers of digits, in LLVM's language; see ``llvm.dot``.

A token's record of a group of inputs: its scale and the sum of its numbers, in float32, then the
upper digits of all inputs, the middle ones and the lower ones, in 8 bits each. A number is its
digits, in base 256, times the scale. Both scale and sum are NaN if a number is infinite or NaN.
"""

from __future__ import annotations

import struct

from chairlift.engine.cpu.compiled.llvm.jobs import shared

DIGITS = 3
# Bytes before the digits in a record.
HEAD_BYTES = 8
# The largest whole number: its upper digit is 127. And the smallest number for which the largest of
# a group counts, so that its scale is a normal float32 number.
LARGEST, SMALLEST = 127.0 * 65536, 2.0**-100


def token_bytes(inputs: int, group: int) -> int:
    """The bytes of a token's records."""
    return inputs // group * (HEAD_BYTES + DIGITS * group)


def constant(number: float) -> str:
    """A float32 number in LLVM's language, which writes its bits as those of a float64."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def all_of(lanes: int, number: float) -> str:
    """A register of the same numbers: whole numbers of 32 bits, or float32."""
    text = f"i32 {number}" if isinstance(number, int) else f"float {constant(number)}"
    return f"<{', '.join([text] * lanes)}>"


def digits(lanes: int) -> str:
    """The function ``digits`` of ``llvm.dot.DotKernel``, for registers of ``lanes`` numbers."""
    floats, integers, octets = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{lanes} x i8>"
    largest, below = (all_of(lanes, number) for number in (LARGEST + 2, -LARGEST - 2))
    half, byte, shift = (all_of(lanes, number) for number in (128, 255, 8))
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
largest:
  %i = phi i64 [0, %groups_loop], [%i_next, %largest]
  %most = phi {floats} [zeroinitializer, %groups_loop], [%most_next, %largest]
  %odd = phi {floats} [zeroinitializer, %groups_loop], [%odd_next, %largest]
  %xp = getelementptr float, ptr %xg, i64 %i
  %v = load {floats}, ptr %xp, align 4
  %size_of = call {floats} @llvm.fabs.v{lanes}f32({floats} %v)
  %most_next = call {floats} @llvm.maxnum.v{lanes}f32({floats} %most, {floats} %size_of)
  %odd_next = call {floats} @llvm.fma.v{lanes}f32({floats} %v, {floats} zeroinitializer,
    {floats} %odd)
  %i_next = add i64 %i, {lanes}
  %i_more = icmp ult i64 %i_next, %group
  br i1 %i_more, label %largest, label %scale
scale:
  %max = call float @llvm.vector.reduce.fmax.v{lanes}f32({floats} %most_next)
  %nan = call float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, {floats} %odd_next)
  %tiny = fcmp olt float %max, {constant(SMALLEST)}
  %top = select i1 %tiny, float {constant(SMALLEST)}, float %max
  %unit = fdiv float %top, {constant(LARGEST)}
  %units = fdiv float {constant(LARGEST)}, %top
  %units_0 = insertelement {floats} poison, float %units, i32 0
  %units_all = shufflevector {floats} %units_0, {floats} poison, <{lanes} x i32> zeroinitializer
  %factor = fadd float %unit, %nan
  store float %factor, ptr %rg, align 4
  br label %numbers
numbers:
  %n = phi i64 [0, %scale], [%n_next, %numbers]
  %sums = phi {integers} [zeroinitializer, %scale], [%sums_next, %numbers]
  %np = getelementptr float, ptr %xg, i64 %n
  %nv = load {floats}, ptr %np, align 4
  %scaled = fmul {floats} %nv, %units_all
  %round = call {floats} @llvm.rint.v{lanes}f32({floats} %scaled)
  %capped = call {floats} @llvm.minnum.v{lanes}f32({floats} %round, {floats} {largest})
  %within = call {floats} @llvm.maxnum.v{lanes}f32({floats} %capped, {floats} {below})
  %whole = fptosi {floats} %within to {integers}
  %sums_next = add {integers} %sums, %whole
  %l0 = add {integers} %whole, {half}
  %l1 = and {integers} %l0, {byte}
  %low = sub {integers} %l1, {half}
  %rest = sub {integers} %whole, %low
  %m = ashr {integers} %rest, {shift}
  %m0 = add {integers} %m, {half}
  %m1 = and {integers} %m0, {byte}
  %mid = sub {integers} %m1, {half}
  %m_rest = sub {integers} %m, %mid
  %high = ashr {integers} %m_rest, {shift}
  %h_bytes = trunc {integers} %high to {octets}
  %m_bytes = trunc {integers} %mid to {octets}
  %l_bytes = trunc {integers} %low to {octets}
  %hp = getelementptr i8, ptr %upper, i64 %n
  %mp = getelementptr i8, ptr %middle, i64 %n
  %lp = getelementptr i8, ptr %lower, i64 %n
  store {octets} %h_bytes, ptr %hp, align 1
  store {octets} %m_bytes, ptr %mp, align 1
  store {octets} %l_bytes, ptr %lp, align 1
  %n_next = add i64 %n, {lanes}
  %n_more = icmp ult i64 %n_next, %group
  br i1 %n_more, label %numbers, label %group_end
group_end:
  %sum = call i32 @llvm.vector.reduce.add.v{lanes}i32({integers} %sums_next)
  %sum_float = sitofp i32 %sum to float
  %sum_scaled = fmul float %sum_float, %factor
  %sp = getelementptr float, ptr %rg, i64 1
  store float %sum_scaled, ptr %sp, align 4
  %g_next = add i64 %g, 1
  %g_more = icmp ult i64 %g_next, %groups
  br i1 %g_more, label %groups_loop, label %part_end
"""
    return shared("digits", "ptr %x, ptr %records, i64 %groups, i64 %group", body)
