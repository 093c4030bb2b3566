"""Choices of tokens from logits, in LLVM's language.

A line is the ``numbers`` logits of a row. A weight is ``exp((logit - highest) * rate)``; what is
below ``SMALLEST`` is 0. A line has ``PARTS`` parts of ``length`` numbers; the last ones may be
shorter or empty.

All functions are jobs whose parts several threads may share; see ``llvm.jobs``. ``%part`` is the
number of such a part. In four functions it computes a line:

- ``scan``: the place of the line's first highest number, and that number; NaN if any number is NaN.
- ``mask``: copies the line, with -inf where its bits are 0.
- ``uniform``: a line of random numbers below 1, those of MLX for a key.
- ``race``: each number of one part of the line whose weight is at least ``least`` gets an
  exponentially distributed time divided by its weight. The place of the first one in time, or -1
  if there is none.

In two functions it computes one part of a line:

- ``weigh``: stores its weights.
- ``sum_weights``: the sum of its weights that are at least ``least``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm import kernel
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import number, splat
from chairlift.engine.cpu.compiled.llvm.sampling import random
from chairlift.engine.cpu.compiled.llvm.sampling.line_loop import (
    DECLARED,
    FLAGS,
    FLOATS,
    INTEGERS,
    LANES,
    Pass,
    equal,
    lane_numbers,
    loop,
    places,
    read,
    spread,
)
from chairlift.engine.cpu.compiled.llvm.softmax import exponential

PARTS = 16
# The least weight that is not 0.
SMALLEST = 2.0**-60
_DOUBLES = f"<{LANES} x double>"
_INFINITY = float("inf")


class SamplingKernel(NamedTuple):
    """The compiled functions. First the addresses of arrays, then numbers.

    Attributes:
        scan: lines, which of them to scan (int64), and the results' places (int32) and logits;
            numbers.
        mask: lines, bits (one int32 for 32 numbers), results; numbers, the bytes of a line's bits.
        weigh: lines, which of them to weigh (int64), for each of these the highest logit and the
            rate, and the weights; numbers, length.
        sum_weights: the same, but for each line the least weight, and the sums (float64), in place
            of the weights; numbers, length.
        uniform: keys (two uint32 each), results; how many of each key.
        race: lines, which of them to draw from (int64), for each of these the highest logit, the
            rate, the least weight, the part (int64) and ``1 + length`` random numbers of which the
            first is not read, and the resulting places (int64); numbers, length.
    """

    scan: Function
    mask: Function
    weigh: Function
    sum_weights: Function
    uniform: Function
    race: Function


@functools.cache
def compiled() -> SamplingKernel | None:
    """The kernel for this CPU; None if ``llvm.kernel`` has none."""
    compiler = host_compiler()
    if compiler is None or kernel.compiled() is None:
        return None
    function = compiler.compile(source()).function
    return SamplingKernel(*map(function, SamplingKernel._fields))


def source() -> str:
    """All functions."""
    return "\n".join(
        [
            f"declare {FLOATS} @llvm.fma.v{LANES}f32({FLOATS}, {FLOATS}, {FLOATS})",
            DECLARED,
            f"declare double @llvm.vector.reduce.fadd.v{LANES}f64(double, {_DOUBLES})",
            f"declare float @llvm.vector.reduce.fmax.v{LANES}f32({FLOATS})",
            f"declare i32 @llvm.vector.reduce.umin.v{LANES}i32({INTEGERS})",
            f"declare i1 @llvm.vector.reduce.or.v{LANES}i1({FLAGS})",
            f"declare {INTEGERS} @llvm.fshl.v{LANES}i32({INTEGERS}, {INTEGERS}, {INTEGERS})",
            "declare i64 @llvm.umin.i64(i64, i64)",
            exponential(LANES),
            _weight(),
            random.time(),
            random.random(),
            _scan(),
            _mask(),
            _weigh(),
            _sum_weights(),
            random.uniform(),
            _race(),
        ]
    )


def _line(index: str) -> str:
    """``%line``: the address of the line whose number is at an index of ``%rows``."""
    return f"""
  {read("%row", "%rows", index, "i64")}
  %line.o = mul i64 %row, %numbers
  %line = getelementptr float, ptr %lines, i64 %line.o
"""


def _limits(part: str) -> str:
    """``%start.at`` and ``%stop.at``: where a part of a line begins and ends."""
    return f"""
  %begin = mul i64 {part}, %length
  %start.at = call i64 @llvm.umin.i64(i64 %begin, i64 %numbers)
  %beyond = add i64 %start.at, %length
  %stop.at = call i64 @llvm.umin.i64(i64 %beyond, i64 %numbers)
"""


def _weight() -> str:
    """The weights of logits; 0 for NaN."""
    return f"""
define internal {FLOATS} @weight({FLOATS} %x, {FLOATS} %high, {FLOATS} %rate) alwaysinline {{
  %below = fsub {FLOATS} %x, %high
  %scaled = fmul {FLOATS} %below, %rate
  %e = call {FLOATS} @exponential({FLOATS} %scaled)
  %some = fcmp oge {FLOATS} %e, {splat(SMALLEST, LANES)}
  %w = select {FLAGS} %some, {FLOATS} %e, {FLOATS} zeroinitializer
  ret {FLOATS} %w
}}
"""


def _winner(best: str, at: str) -> str:
    """``%most``: the highest of the lanes ``best``; ``%winner``: the least place in ``at`` that
    has it.
    """
    return f"""
  %most = call float @llvm.vector.reduce.fmax.v{LANES}f32({FLOATS} {best})
  {spread("%mosts", "%most", "float")}
  %wins = fcmp oeq {FLOATS} {best}, %mosts
  %candidates = select {FLAGS} %wins, {INTEGERS} {at}, {INTEGERS} {equal(-1)}
  %winner = call i32 @llvm.vector.reduce.umin.v{LANES}i32({INTEGERS} %candidates)
"""


def _scale(index: str) -> str:
    """``%high`` and ``%rate``: the highest logit and the rate at an index, in all lanes."""
    return f"""
  {read("%high.one", "%highest", index, "float")}
  {spread("%high", "%high.one", "float")}
  {read("%rate.one", "%rates", index, "float")}
  {spread("%rate", "%rate.one", "float")}
"""


def _bound(index: str) -> str:
    """``%bound``: the least weight at an index, in all lanes."""
    return f"""
  {read("%bound.one", "%leasts", index, "float")}
  {spread("%bound", "%bound.one", "float")}
"""


def _weighed(each: Pass) -> str:
    """``%w``: the weights of a line's numbers."""
    end = each.end
    return f"""
  {each.load("x", "%line", -_INFINITY)}
  %w{end} = call {FLOATS} @weight({FLOATS} %x{end}, {FLOATS} %high, {FLOATS} %rate)
"""


def _best(each: Pass, condition: str, value: str) -> str:
    """Where a condition is true, the states ``best`` and ``at`` become a value and its place."""
    end = each.end
    chosen = f"select {FLAGS} %{condition}{end}"
    return f"""
  %best.next{end} = {chosen}, {FLOATS} %{value}{end}, {FLOATS} {each.state("best")}
  %at.next{end} = {chosen}, {INTEGERS} %place{end}, {INTEGERS} {each.state("at")}
"""


def _scan() -> str:
    def body(each: Pass) -> str:
        end = each.end
        return f"""
  {each.load("x", "%line", -_INFINITY)}
  {places(each)}
  %unordered{end} = fcmp uno {FLOATS} %x{end}, %x{end}
  %bad.next{end} = or {FLAGS} {each.state("bad")}, %unordered{end}
  %above{end} = fcmp ogt {FLOATS} %x{end}, {each.state("best")}
  {_best(each, "above", "x")}
"""

    states = {
        "best": (FLOATS, splat(-_INFINITY, LANES)),
        "at": (INTEGERS, lane_numbers()),
        "bad": (FLAGS, "zeroinitializer"),
    }
    work = f"""
  {_line("%part")}
  {loop("0", "%numbers", states, body)}
  {_winner("%best.all", "%at.all")}
  %any = call i1 @llvm.vector.reduce.or.v{LANES}i1({FLAGS} %bad.all)
  %highest = select i1 %any, float {number(float("nan"))}, float %most
  %token.to = getelementptr i32, ptr %tokens, i64 %part
  store i32 %winner, ptr %token.to, align 4
  %highest.to = getelementptr float, ptr %logits, i64 %part
  store float %highest, ptr %highest.to, align 4
  br label %part_end
"""
    return shared("scan", "ptr %lines, ptr %rows, ptr %tokens, ptr %logits, i64 %numbers", work)


def _mask() -> str:
    def body(each: Pass) -> str:
        end = each.end
        return f"""
  {each.load("x", "%line", -_INFINITY)}
  %byte{end} = lshr i64 {each.first}, 3
  %word.at{end} = getelementptr i8, ptr %bits.line, i64 %byte{end}
  %word{end} = load i{LANES}, ptr %word.at{end}, align 1
  %allowed{end} = bitcast i{LANES} %word{end} to {FLAGS}
  %y{end} = select {FLAGS} %allowed{end}, {FLOATS} %x{end}, \
{FLOATS} {splat(-_INFINITY, LANES)}
  {each.store(f"%y{end}", "y", "%result")}
"""

    work = f"""
  %line.o = mul i64 %part, %numbers
  %line = getelementptr float, ptr %lines, i64 %line.o
  %result = getelementptr float, ptr %results, i64 %line.o
  %bits.o = mul i64 %part, %bytes
  %bits.line = getelementptr i8, ptr %bits, i64 %bits.o
  {loop("0", "%numbers", {}, body)}
  br label %part_end
"""
    return shared("mask", "ptr %lines, ptr %bits, ptr %results, i64 %numbers, i64 %bytes", work)


def _part_of_line() -> str:
    """``%index``: which line; ``%own``: which part of it; and that part's limits."""
    return f"""
  %index = udiv i64 %part, {PARTS}
  %own = urem i64 %part, {PARTS}
  {_limits("%own")}
"""


def _weigh() -> str:
    def body(each: Pass) -> str:
        return f"""
  {_weighed(each)}
  {each.store(f"%w{each.end}", "w", "%weight.line")}
"""

    work = f"""
  {_part_of_line()}
  {_line("%index")}
  {_scale("%index")}
  %weight.o = mul i64 %index, %numbers
  %weight.line = getelementptr float, ptr %weights, i64 %weight.o
  {loop("%start.at", "%stop.at", {}, body)}
  br label %part_end
"""
    arrays = "ptr %lines, ptr %rows, ptr %highest, ptr %rates, ptr %weights"
    return shared("weigh", f"{arrays}, i64 %numbers, i64 %length", work)


def _sum_weights() -> str:
    def body(each: Pass) -> str:
        end = each.end
        return f"""
  {_weighed(each)}
  %heavy{end} = fcmp oge {FLOATS} %w{end}, %bound
  %kept{end} = select {FLAGS} %heavy{end}, {FLOATS} %w{end}, {FLOATS} zeroinitializer
  %long{end} = fpext {FLOATS} %kept{end} to {_DOUBLES}
  %sum.next{end} = fadd {_DOUBLES} {each.state("sum")}, %long{end}
"""

    work = f"""
  {_part_of_line()}
  {_line("%index")}
  {_scale("%index")}
  {_bound("%index")}
  {loop("%start.at", "%stop.at", {"sum": (_DOUBLES, "zeroinitializer")}, body)}
  %total = call reassoc double @llvm.vector.reduce.fadd.v{LANES}f64(double 0.0, {_DOUBLES} %sum.all)
  %total.to = getelementptr double, ptr %sums, i64 %part
  store double %total, ptr %total.to, align 8
  br label %part_end
"""
    arrays = "ptr %lines, ptr %rows, ptr %highest, ptr %rates, ptr %leasts, ptr %sums"
    return shared("sum_weights", f"{arrays}, i64 %numbers, i64 %length", work)


def _race() -> str:
    def body(each: Pass) -> str:
        end = each.end
        return f"""
  {_weighed(each)}
  %own.i{end} = sub i64 {each.first}, %start.at
  {each.load("u", "%own.uniform", 0.0, f"%own.i{end}")}
  %t{end} = call {FLOATS} @time({FLOATS} %u{end})
  %speed{end} = fdiv {FLOATS} %w{end}, %t{end}
  %heavy{end} = fcmp oge {FLOATS} %w{end}, %bound
  %above{end} = fcmp ogt {FLOATS} %speed{end}, {each.state("best")}
  %better{end} = and {FLAGS} %heavy{end}, %above{end}
  {places(each)}
  {_best(each, "better", "speed")}
"""

    states = {"best": (FLOATS, "zeroinitializer"), "at": (INTEGERS, equal(-1))}
    work = f"""
  {_line("%part")}
  {_scale("%part")}
  {_bound("%part")}
  {read("%own", "%places", "%part", "i64")}
  {_limits("%own")}
  %uniform.count = add i64 %length, 1
  %uniform.o = mul i64 %part, %uniform.count
  %uniform.first = add i64 %uniform.o, 1
  %own.uniform = getelementptr float, ptr %uniform, i64 %uniform.first
  {loop("%start.at", "%stop.at", states, body)}
  {_winner("%best.all", "%at.all")}
  %token = sext i32 %winner to i64
  %token.to = getelementptr i64, ptr %tokens, i64 %part
  store i64 %token, ptr %token.to, align 8
  br label %part_end
"""
    arrays = "ptr %lines, ptr %rows, ptr %highest, ptr %rates, ptr %leasts, ptr %places"
    arrays += ", ptr %uniform, ptr %tokens"
    return shared("race", f"{arrays}, i64 %numbers, i64 %length", work)
