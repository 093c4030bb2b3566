"""Parts of ``llvm.row_attention``: e to the power of numbers, hyperbolic tangents, transposition,
capped scores, and softmax.
"""

from __future__ import annotations

import math

from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.lanes import splat, spread

# The highest score before the first one, and the score of a column that a query does not see.
LEAST = -3.4e38
# e to the power of less than this is as good as 0.
_MIN_EXPONENT = -87.0
# Cephes' expf: coefficients of e^x for |x| <= log(2) / 2, from that of x^7 to that of x^2; and
# log(2) as the sum of two numbers, the first with so few digits that its multiples are exact.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.16666665459, 0.5)
_LOG2_HIGH, _LOG2_LOW = 0.693359375, -2.12194440e-4
# Added to a small number, it rounds it to an integer, which is in the lowest bits of the sum.
_ROUND = 1.5 * 2**23


def exponential(lanes: int) -> str:
    """e to the power of numbers that are at most 0; NaN stays NaN."""
    vector, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    fma, least = f"call {vector} @llvm.fma.v{lanes}f32", splat(_MIN_EXPONENT, lanes)
    bias, shift = (", ".join([f"i32 {value}"] * lanes) for value in (127, 23))
    lines = [
        f"define internal {vector} @exponential({vector} %x) alwaysinline {{",
        f"%small = fcmp olt {vector} %x, {least}",
        f"%c = select <{lanes} x i1> %small, {vector} {least}, {vector} %x",
        f"%t = fmul {vector} %c, {splat(1 / math.log(2), lanes)}",
        f"%m = fadd {vector} %t, {splat(_ROUND, lanes)}",
        f"%n = fsub {vector} %m, {splat(_ROUND, lanes)}",
        f"%r0 = {fma}({vector} %n, {vector} {splat(-_LOG2_HIGH, lanes)}, {vector} %c)",
        f"%r = {fma}({vector} %n, {vector} {splat(-_LOG2_LOW, lanes)}, {vector} %r0)",
    ]
    power = splat(_EXP[0], lanes)
    for place, coefficient in enumerate(_EXP[1:]):
        added = splat(coefficient, lanes)
        lines.append(f"%p{place} = {fma}({vector} {power}, {vector} %r, {vector} {added})")
        power = f"%p{place}"
    lines += [
        f"%rr = fmul {vector} %r, %r",
        f"%y0 = {fma}({vector} {power}, {vector} %rr, {vector} %r)",
        f"%y = fadd {vector} %y0, {splat(1.0, lanes)}",
        f"%i = bitcast {vector} %m to {integers}",
        f"%b = add {integers} %i, <{bias}>",
        f"%e = shl {integers} %b, <{shift}>",
        f"%f = bitcast {integers} %e to {vector}",
        f"%z = fmul {vector} %y, %f",
        f"ret {vector} %z",
        "}",
    ]
    return "\n".join(lines)


def transpose(lanes: int, stored: str) -> str:
    """A function that transposes the keys of a panel's columns to ``[dim, columns]`` in float32.

    The last of fewer columns is repeated.

    Args:
        stored: the type of the keys, ``float`` or ``half``; the function is named by it.
    """
    vector, panel = f"<{lanes} x float>", WIDE * lanes
    arguments = "ptr %b, ptr %t, i64 %dim, i64 %step, i64 %columns"
    lines = [
        f"define internal void @transpose_{stored}({arguments}) {{",
        "entry:",
        "%last = sub i64 %columns, 1",
    ]
    for column in range(panel):
        lines += [
            f"%c{column} = call i64 @llvm.umin.i64(i64 {column}, i64 %last)",
            f"%o{column} = mul i64 %c{column}, %step",
            f"%p{column} = getelementptr {stored}, ptr %b, i64 %o{column}",
        ]
    lines += ["br label %loop", "loop:", "%d = phi i64 [0, %entry], [%d_next, %loop]"]
    for wide in range(WIDE):
        names = [f"%w{wide}_0_{i}" for i in range(lanes)]
        for i, name in enumerate(names):
            at = f"%a{wide}_{i}"
            lines += [
                f"{at} = getelementptr {stored}, ptr %p{wide * lanes + i}, i64 %d",
                *loaded(name, lanes, stored, at),
            ]
        # Each round exchanges one bit of the numbers of registers with that of their elements.
        for bit in (1 << n for n in range(lanes.bit_length() - 1)):
            before, names = names, [f"%w{wide}_{2 * bit}_{i}" for i in range(lanes)]
            for i, name in enumerate(names):
                one, other = before[i & ~bit], before[i | bit]
                taken = [(k & ~bit | (bit if i & bit else 0), k & bit) for k in range(lanes)]
                places = ", ".join(f"i32 {k + (lanes if later else 0)}" for k, later in taken)
                lines.append(
                    f"{name} = shufflevector {vector} {one}, {vector} {other}, "
                    f"<{lanes} x i32> <{places}>"
                )
        for i, name in enumerate(names):
            lines += [
                f"%di{wide}_{i} = add i64 %d, {i}",
                f"%to{wide}_{i} = mul i64 %di{wide}_{i}, {panel}",
                f"%tw{wide}_{i} = add i64 %to{wide}_{i}, {wide * lanes}",
                f"%tp{wide}_{i} = getelementptr float, ptr %t, i64 %tw{wide}_{i}",
                f"store {vector} {name}, ptr %tp{wide}_{i}, align 4",
            ]
    lines += [
        f"%d_next = add i64 %d, {lanes}",
        "%more = icmp ult i64 %d_next, %dim",
        "br i1 %more, label %loop, label %end",
        "end:",
        "ret void",
        "}",
    ]
    return "\n".join(lines)


def loaded(name: str, lanes: int, stored: str, address: str) -> list[str]:
    """Loads a register of numbers of a type, ``float`` or ``half``, as float32."""
    if stored == "float":
        return [f"{name} = load <{lanes} x float>, ptr {address}, align 4"]
    return [
        f"{name}.half = load <{lanes} x half>, ptr {address}, align 2",
        f"{name} = fpext <{lanes} x half> {name}.half to <{lanes} x float>",
    ]


def tangent(lanes: int) -> str:
    """The hyperbolic tangent, by the power of a number that is at most 0; NaN stays NaN."""
    vector = f"<{lanes} x float>"
    one, copysign = splat(1.0, lanes), f"call {vector} @llvm.copysign.v{lanes}f32"
    return f"""
declare {vector} @llvm.copysign.v{lanes}f32({vector}, {vector})
define internal {vector} @tangent({vector} %x) alwaysinline {{
  %exponent = fmul {vector} %x, {splat(-2.0, lanes)}
  %below = {copysign}({vector} %exponent, {vector} {splat(-1.0, lanes)})
  %power = call {vector} @exponential({vector} %below)
  %less = fsub {vector} {one}, %power
  %more = fadd {vector} {one}, %power
  %share = fdiv {vector} %less, %more
  %signed = {copysign}({vector} %share, {vector} %x)
  ret {vector} %signed
}}
"""


def capping(lanes: int) -> str:
    """A function that bounds a query's scores of a block: ``cap * tanh(score / cap)``."""
    vector = f"<{lanes} x float>"
    return f"""
define internal void @bound(ptr %s, i64 %count, float %cap) {{
entry:
  {spread("%caps", "%cap", lanes)}
  br label %loop
loop:
  %j = phi i64 [0, %entry], [%j_next, %loop]
  %at = getelementptr float, ptr %s, i64 %j
  %score = load {vector}, ptr %at, align 4
  %share = fdiv {vector} %score, %caps
  %part = call {vector} @tangent({vector} %share)
  %bounded = fmul {vector} %part, %caps
  store {vector} %bounded, ptr %at, align 4
  %j_next = add i64 %j, {lanes}
  %j_more = icmp ult i64 %j_next, %count
  br i1 %j_more, label %loop, label %end
end:
  ret void
}}
"""


def softmax(lanes: int) -> str:
    """A function that turns a query's scores of a block into weights, relative to the highest score
    so far; what was summed relative to a lower one is made smaller.
    """
    vector, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    return f"""
declare float @llvm.vector.reduce.fmax.v{lanes}f32({vector})
define internal void @softmax(ptr %s, i64 %seen, i64 %count, ptr %max, ptr %sum, ptr %mixed,
                              i64 %width) {{
entry:
  %old = load float, ptr %max, align 4
  %limit32 = trunc i64 %seen to i32
  %limit0 = insertelement {integers} poison, i32 %limit32, i32 0
  %limit = shufflevector {integers} %limit0, {integers} poison, {integers} zeroinitializer
  br label %highest
{_highest(lanes)}
{_weigh(lanes)}
{_rescale(lanes)}
end:
  ret void
}}
"""


def _seen_scores(loop: str, lanes: int) -> str:
    """Reads a register of scores, and finds which of their columns the query sees.

    Args:
        loop: the beginning of the names in the loop over the columns.
    """
    vector, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    numbers = ", ".join(f"i32 {lane}" for lane in range(lanes))
    return f"""%{loop}at = getelementptr float, ptr %s, i64 %{loop}j
  %{loop}score = load {vector}, ptr %{loop}at, align 4
  %{loop}j32 = trunc i64 %{loop}j to i32
  %{loop}j0 = insertelement {integers} poison, i32 %{loop}j32, i32 0
  %{loop}js = shufflevector {integers} %{loop}j0, {integers} poison, {integers} zeroinitializer
  %{loop}place = add {integers} %{loop}js, <{numbers}>
  %{loop}seen = icmp slt {integers} %{loop}place, %limit"""


def _highest(lanes: int) -> str:
    """Finds the highest score of the columns that the query sees, and of those before."""
    vector, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    least = splat(LEAST, lanes)
    return f"""highest:
  %aj = phi i64 [0, %entry], [%aj_next, %highest]
  %top = phi {vector} [{least}, %entry], [%top_next, %highest]
  {_seen_scores("a", lanes)}
  %visible = select <{lanes} x i1> %aseen, {vector} %ascore, {vector} {least}
  %higher = fcmp ogt {vector} %visible, %top
  %top_next = select <{lanes} x i1> %higher, {vector} %visible, {vector} %top
  %aj_next = add i64 %aj, {lanes}
  %amore = icmp ult i64 %aj_next, %count
  br i1 %amore, label %highest, label %found
found:
  %block_max = call float @llvm.vector.reduce.fmax.v{lanes}f32({vector} %top_next)
  %rises = fcmp ogt float %block_max, %old
  %new = select i1 %rises, float %block_max, float %old
  store float %new, ptr %max, align 4
  %new0 = insertelement {vector} poison, float %new, i32 0
  %news = shufflevector {vector} %new0, {vector} poison, {integers} zeroinitializer
  br label %weigh"""


def _weigh(lanes: int) -> str:
    """Turns the scores into weights, and adds these to the sum of weights."""
    vector, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    return f"""weigh:
  %bj = phi i64 [0, %found], [%bj_next, %weigh]
  %total = phi {vector} [zeroinitializer, %found], [%total_next, %weigh]
  {_seen_scores("b", lanes)}
  %below = fsub {vector} %bscore, %news
  %power = call {vector} @exponential({vector} %below)
  %weight = select <{lanes} x i1> %bseen, {vector} %power, {vector} zeroinitializer
  store {vector} %weight, ptr %bat, align 4
  %total_next = fadd {vector} %total, %weight
  %bj_next = add i64 %bj, {lanes}
  %bmore = icmp ult i64 %bj_next, %count
  br i1 %bmore, label %weigh, label %weighed
weighed:
  %block_sum = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float -0.0,
                                                                        {vector} %total_next)
  %drop = fsub float %old, %new
  %drop0 = insertelement {vector} poison, float %drop, i32 0
  %drops = shufflevector {vector} %drop0, {vector} poison, {integers} zeroinitializer
  %factors = call {vector} @exponential({vector} %drops)
  %factor = extractelement {vector} %factors, i32 0
  %sum_old = load float, ptr %sum, align 4
  %sum_less = fmul float %sum_old, %factor
  %sum_new = fadd float %sum_less, %block_sum
  store float %sum_new, ptr %sum, align 4
  br i1 %rises, label %rescale, label %end"""


def _rescale(lanes: int) -> str:
    """Makes the sums of values smaller if the highest score has risen."""
    vector = f"<{lanes} x float>"
    return f"""rescale:
  %o = phi i64 [0, %weighed], [%o_next, %rescale]
  %op = getelementptr float, ptr %mixed, i64 %o
  %ov = load {vector}, ptr %op, align 4
  %os = fmul {vector} %ov, %factors
  store {vector} %os, ptr %op, align 4
  %o_next = add i64 %o, {lanes}
  %o_more = icmp ult i64 %o_next, %width
  br i1 %o_more, label %rescale, label %end"""


def merging(lanes: int) -> str:
    """A function that adds the result of later columns to that of earlier ones, query by query.

    A query that sees none of the later columns keeps its result to the last bit.
    """
    vector = f"<{lanes} x float>"
    fma = f"call {vector} @llvm.fma.v{lanes}f32"
    return f"""
define internal void @merge(ptr %mixed, ptr %highest, ptr %sums, ptr %later, i64 %queries,
                            i64 %width) {{
entry:
  %size = mul i64 %queries, %width
  %later_highest = getelementptr float, ptr %later, i64 %size
  %later_sums = getelementptr float, ptr %later_highest, i64 %queries
  br label %query
query:
  %q = phi i64 [0, %entry], [%q_next, %query_end]
  %high_at = getelementptr float, ptr %highest, i64 %q
  %high = load float, ptr %high_at, align 4
  %other_at = getelementptr float, ptr %later_highest, i64 %q
  %other = load float, ptr %other_at, align 4
  %rises = fcmp ogt float %other, %high
  %new = select i1 %rises, float %other, float %high
  store float %new, ptr %high_at, align 4
  %drop = fsub float %high, %new
  %other_drop = fsub float %other, %new
  {spread("%drops", "%drop", lanes)}
  {spread("%other_drops", "%other_drop", lanes)}
  %factors = call {vector} @exponential({vector} %drops)
  %other_factors = call {vector} @exponential({vector} %other_drops)
  %factor = extractelement {vector} %factors, i32 0
  %other_factor = extractelement {vector} %other_factors, i32 0
  %sum_at = getelementptr float, ptr %sums, i64 %q
  %sum = load float, ptr %sum_at, align 4
  %other_sum_at = getelementptr float, ptr %later_sums, i64 %q
  %other_sum = load float, ptr %other_sum_at, align 4
  %sum_less = fmul float %sum, %factor
  %other_less = fmul float %other_sum, %other_factor
  %sum_new = fadd float %sum_less, %other_less
  store float %sum_new, ptr %sum_at, align 4
  %first = mul i64 %q, %width
  br label %values
values:
  %v = phi i64 [0, %query], [%v_next, %values]
  %place = add i64 %first, %v
  %at = getelementptr float, ptr %mixed, i64 %place
  %value = load {vector}, ptr %at, align 4
  %other_value_at = getelementptr float, ptr %later, i64 %place
  %other_value = load {vector}, ptr %other_value_at, align 4
  %value_less = fmul {vector} %value, %factors
  %value_new = {fma}({vector} %other_value, {vector} %other_factors, {vector} %value_less)
  store {vector} %value_new, ptr %at, align 4
  %v_next = add i64 %v, {lanes}
  %v_more = icmp ult i64 %v_next, %width
  br i1 %v_more, label %values, label %query_end
query_end:
  %q_next = add i64 %q, 1
  %q_more = icmp ult i64 %q_next, %queries
  br i1 %q_more, label %query, label %end
end:
  ret void
}}
"""
