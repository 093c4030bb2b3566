"""MLX's random numbers, and times of an exponential distribution, in LLVM's language."""

from __future__ import annotations

from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import splat
from chairlift.engine.cpu.compiled.llvm.sampling.line_loop import (
    FLAGS,
    FLOATS,
    INTEGERS,
    LANES,
    Pass,
    equal,
    loop,
    places,
    read,
    spread,
)

# The smallest time; it must not be 0.
MIN_TIME = 1e-10
# The largest float32 below 1.
BELOW_ONE = 1 - 2**-24
# Cephes' logf: coefficients from that of x^9 to that of x^3, for 1 + x from sqrt(1/2) to sqrt(2).
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
# log(2) as the sum of two numbers, the first with so few digits that its multiples are exact.
_LOG2_HIGH, _LOG2_LOW = 0.693359375, -2.12194440e-4
# Threefry-2x32 with 20 rounds: the distances by which rounds rotate, and the number of its keys.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def time() -> str:
    """-log(1 - u) for u from 0 to below 1, at least MIN_TIME."""
    fma = f"call {FLOATS} @llvm.fma.v{LANES}f32"
    power, terms = splat(_LOG[0], LANES), []
    for place, coefficient in enumerate(_LOG[1:]):
        added = splat(coefficient, LANES)
        terms.append(f"%p{place} = {fma}({FLOATS} {power}, {FLOATS} %f, {FLOATS} {added})")
        power = f"%p{place}"
    horner = "\n  ".join(terms)
    half_root = 0x3F3504F3  # sqrt(1/2), as an integer
    return f"""
define internal {FLOATS} @time({FLOATS} %u) alwaysinline {{
  %v = fsub {FLOATS} {splat(1.0, LANES)}, %u
  %d = fsub {FLOATS} {splat(1.0, LANES)}, %v
  %lost = fsub {FLOATS} %d, %u
  %bits = bitcast {FLOATS} %v to {INTEGERS}
  %above = sub {INTEGERS} %bits, {equal(half_root)}
  %e = ashr {INTEGERS} %above, {equal(23)}
  %e.bits = shl {INTEGERS} %e, {equal(23)}
  %m.bits = sub {INTEGERS} %bits, %e.bits
  %m = bitcast {INTEGERS} %m.bits to {FLOATS}
  %f = fsub {FLOATS} %m, {splat(1.0, LANES)}
  %n = sitofp {INTEGERS} %e to {FLOATS}
  {horner}
  %z = fmul {FLOATS} %f, %f
  %fz = fmul {FLOATS} %f, %z
  %y0 = fmul {FLOATS} {power}, %fz
  %y1 = {fma}({FLOATS} %n, {FLOATS} {splat(_LOG2_LOW, LANES)}, {FLOATS} %y0)
  %y2 = {fma}({FLOATS} %z, {FLOATS} {splat(-0.5, LANES)}, {FLOATS} %y1)
  %y3 = fadd {FLOATS} %f, %y2
  %y4 = {fma}({FLOATS} %n, {FLOATS} {splat(_LOG2_HIGH, LANES)}, {FLOATS} %y3)
  ; The logarithm of 1 - u, of which %lost was rounded away.
  %log = fadd {FLOATS} %y4, %lost
  %t = fneg {FLOATS} %log
  %late = fcmp ogt {FLOATS} %t, {splat(MIN_TIME, LANES)}
  %result = select {FLAGS} %late, {FLOATS} %t, {FLOATS} {splat(MIN_TIME, LANES)}
  ret {FLOATS} %result
}}
"""


def random() -> str:
    """Threefry-2x32 of a key and of counters, as random numbers below 1."""
    lines = []
    x, y = "%x0", "%y0"
    for block in range(5):
        for turn, distance in enumerate(_ROTATIONS[block % 2]):
            name = f"{block}_{turn}"
            by = equal(distance)
            lines += [
                f"%a{name} = add {INTEGERS} {x}, {y}",
                f"%r{name} = call {INTEGERS} @llvm.fshl.v{LANES}i32({INTEGERS} {y}, "
                f"{INTEGERS} {y}, {INTEGERS} {by})",
                f"%b{name} = xor {INTEGERS} %r{name}, %a{name}",
            ]
            x, y = f"%a{name}", f"%b{name}"
        lines += [
            f"%c{block} = add {INTEGERS} {x}, %k{(block + 1) % 3}",
            f"%d{block} = add {INTEGERS} {y}, %k{(block + 2) % 3}",
            f"%e{block} = add {INTEGERS} %d{block}, {equal(block + 1)}",
        ]
        x, y = f"%c{block}", f"%e{block}"
    rounds = "\n  ".join(lines)
    limit = splat(BELOW_ONE, LANES)
    numbers = "\n  ".join(
        f"""
  %{name}.whole = uitofp {INTEGERS} {bits} to {FLOATS}
  %{name}.scaled = fmul {FLOATS} %{name}.whole, {splat(2.0**-32, LANES)}
  %{name}.small = fcmp olt {FLOATS} %{name}.scaled, {limit}
  %{name} = select {FLAGS} %{name}.small, {FLOATS} %{name}.scaled, {FLOATS} {limit}
"""
        for name, bits in (("first", x), ("second", y))
    )
    pair = f"{{{FLOATS}, {FLOATS}}}"
    return f"""
define internal {pair} @random({INTEGERS} %k0, {INTEGERS} %k1, {INTEGERS} %count0,
                               {INTEGERS} %count1) alwaysinline {{
  %k01 = xor {INTEGERS} %k0, %k1
  %k2 = xor {INTEGERS} %k01, {equal(_PARITY)}
  %x0 = add {INTEGERS} %count0, %k0
  %y0 = add {INTEGERS} %count1, %k1
  {rounds}
  {numbers}
  %one = insertvalue {pair} poison, {FLOATS} %first, 0
  %both = insertvalue {pair} %one, {FLOATS} %second, 1
  ret {pair} %both
}}
"""


def uniform() -> str:
    """MLX's random numbers: a counter gives one of the first half and one of the second."""
    pair = f"{{{FLOATS}, {FLOATS}}}"

    def call(end: str, count0: str, count1: str) -> str:
        return f"""
  %pair{end} = call {pair} @random({INTEGERS} %k0, {INTEGERS} %k1, {INTEGERS} {count0},
                                   {INTEGERS} {count1})
  %low{end} = extractvalue {pair} %pair{end}, 0
  %high{end} = extractvalue {pair} %pair{end}, 1
"""

    def body(each: Pass) -> str:
        end = each.end
        return f"""
  {places(each)}
  %other{end} = add {INTEGERS} %place{end}, %offsets
  {call(end, f"%place{end}", f"%other{end}")}
  %later{end} = add i64 {each.first}, %offset
  {each.store(f"%low{end}", "low", "%result")}
  {each.store(f"%high{end}", "high", "%result", f"%later{end}")}
"""

    work = f"""
  %key.o = mul i64 %part, 2
  %key.o1 = add i64 %key.o, 1
  {read("%key0", "%keys", "%key.o", "i32")}
  {read("%key1", "%keys", "%key.o1", "i32")}
  {spread("%k0", "%key0", "i32")}
  {spread("%k1", "%key1", "i32")}
  %result.o = mul i64 %part, %count
  %result = getelementptr float, ptr %results, i64 %result.o
  %half = lshr i64 %count, 1
  %odd = and i64 %count, 1
  %offset = add i64 %half, %odd
  %offset.one = trunc i64 %offset to i32
  {spread("%offsets", "%offset.one", "i32")}
  {loop("0", "%half", {}, body)}
  %is.odd = icmp ne i64 %odd, 0
  br i1 %is.odd, label %middle, label %part_end
middle:
  %half.one = trunc i64 %half to i32
  {spread("%halves", "%half.one", "i32")}
  {call(".middle", "%halves", "zeroinitializer")}
  %odd.one = extractelement {FLOATS} %low.middle, i32 0
  %odd.to = getelementptr float, ptr %result, i64 %half
  store float %odd.one, ptr %odd.to, align 4
  br label %part_end
"""
    return shared("uniform", "ptr %keys, ptr %results, i64 %count", work)
