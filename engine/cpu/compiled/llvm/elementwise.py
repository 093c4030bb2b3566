"""What happens to a token between products, in LLVM's language; see ``llvm.kernel``.

The parts are tokens unless it says otherwise, and their numbers are a multiple of a register's.

- ``swiglu`` and ``geglu``: arguments: the addresses of the gates, of the other numbers and of the
  results, then the numbers of a token, and those from one token's gates (and other numbers) to the
  next one's.
- ``norm``: the root mean square norm of each head. Its parts are the heads of all tokens.
  Arguments: the addresses of the inputs, of the weights, of the constant added to the mean, and of
  the results, which may be the inputs; then the numbers of a head, the heads of a token, and the
  numbers from one token's inputs, and from its results, to the next one's.
- ``add``: sums. Arguments: the addresses of two inputs and of the results, which may be the first
  inputs; then the numbers of a token, and those from one token to the next for all three.
- ``scale``: products with a number. Arguments: the addresses of the inputs, of the number and of
  the results, then the numbers of a token, and those from one token to the next for both.
- ``scatter``: copies each token to its place ``[row, head, column]``, and ``scatter_half`` as
  float16, whose largest number stands for larger ones. Arguments: the addresses of
  the inputs, of the results, and of the tokens' rows and columns (integers); then heads, the
  numbers of a head, those from one token's inputs to the next one's, and those from one row, head
  and column of the results to the next.
- ``rotate``: rotary embedding. Arguments: the addresses of the inputs, of a token's cosines and
  sines, and of the results, then heads, half of a head's numbers, and the numbers from one token's
  inputs to the next one's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import splat, spread

# The largest float16.
LARGEST_HALF = 65504.0


def source(lanes: int) -> str:
    """All functions, for registers of ``lanes`` numbers. They use ``llvm.softmax.exponential``."""
    vector = f"<{lanes} x float>"
    return "\n".join(
        [
            f"declare {vector} @llvm.fabs.v{lanes}f32({vector})",
            "declare float @llvm.sqrt.f32(float)",
            sigmoid(lanes),
            _gated("swiglu", lanes, "", "%g"),
            _gated("geglu", lanes, "\n".join(gelu_argument(lanes, "%g", "%z")), "%z"),
            _norm(lanes),
            _add(lanes),
            _scale(lanes),
            _scatter(lanes, "float"),
            _scatter(lanes, "half"),
            _rotate(lanes),
        ]
    )


def _loop(
    lanes: int,
    entry: str,
    inputs: Mapping[str, str],
    lines: str,
    results: str,
    end: str,
    kind: str = "float",
) -> str:
    """Computes ``%numbers`` results, a register at a time, and goes to ``end``.

    Args:
        entry: the block that this is the end of.
        inputs: the addresses from which variables are loaded.
        lines: compute ``%r`` of these variables.
        results: the address to which ``%r`` is stored.
        kind: the type of the results, ``float`` or ``half``.
    """
    vector = f"<{lanes} x float>"
    loads = "\n".join(
        f"  {variable}.at = getelementptr float, ptr {address}, i64 %i\n"
        f"  {variable} = load {vector}, ptr {variable}.at, align 4"
        for variable, address in inputs.items()
    )
    return f"""
  br label %loop
loop:
  %i = phi i64 [0, %{entry}], [%i_next, %loop]
{loads}
{lines}
  %to.at = getelementptr {kind}, ptr {results}, i64 %i
  store <{lanes} x {kind}> %r, ptr %to.at, align {4 if kind == "float" else 2}
  %i_next = add i64 %i, {lanes}
  %more = icmp ult i64 %i_next, %numbers
  br i1 %more, label %loop, label %{end}
"""


def sigmoid(lanes: int) -> str:
    """1 / (1 + e^-x), by the power of a number that is at most 0."""
    vector = f"<{lanes} x float>"
    zero, one = splat(0.0, lanes), splat(1.0, lanes)
    return f"""
define internal {vector} @sigmoid({vector} %x) alwaysinline {{
  %size = call {vector} @llvm.fabs.v{lanes}f32({vector} %x)
  %less = fneg {vector} %size
  %e = call {vector} @exponential({vector} %less)
  %low = fcmp olt {vector} %x, {zero}
  %top = select <{lanes} x i1> %low, {vector} %e, {vector} {one}
  %all = fadd {vector} %e, {one}
  %part = fdiv {vector} %top, %all
  ret {vector} %part
}}
"""


def gelu_argument(lanes: int, x: str, z: str) -> list[str]:
    """Lines that compute the ``z`` of tanh's form of gelu.

    That form is x * sigmoid(z), z = sqrt(8 / pi) * (x + 0.044715 x^3).
    """
    vector = f"<{lanes} x float>"
    root = math.sqrt(8 / math.pi)
    cube, linear = splat(root * 0.044715, lanes), splat(root, lanes)
    return [
        f"%square = fmul {vector} {x}, {x}",
        f"%scaled = fmul {vector} %square, {cube}",
        f"%factor = fadd {vector} %scaled, {linear}",
        f"{z} = fmul {vector} %factor, {x}",
    ]


def _gated(name: str, lanes: int, lines: str, argument: str) -> str:
    """``gate * sigmoid(argument) * other``; ``lines`` compute the argument of the gate ``%g``."""
    vector = f"<{lanes} x float>"
    computed = f"""
  {lines}
  %s = call {vector} @sigmoid({vector} {argument})
  %gs = fmul {vector} %g, %s
  %r = fmul {vector} %gs, %o
"""
    body = f"""
  %from = mul i64 %part, %stride
  %gr = getelementptr float, ptr %gates, i64 %from
  %or = getelementptr float, ptr %others, i64 %from
  %to = mul i64 %part, %numbers
  %rr = getelementptr float, ptr %results, i64 %to
  {_loop(lanes, "work", {"%g": "%gr", "%o": "%or"}, computed, "%rr", "part_end")}
"""
    arguments = "ptr %gates, ptr %others, ptr %results, i64 %numbers, i64 %stride"
    return shared(name, arguments, body)


def _norm(lanes: int) -> str:
    vector, _integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    computed = f"""
  %scaled = fmul {vector} %a, %scales
  %r = fmul {vector} %scaled, %b
"""
    body = f"""
  %eps = load float, ptr %constant, align 4
  %token = udiv i64 %part, %heads
  %head = urem i64 %part, %heads
  %within = mul i64 %head, %numbers
  %xt = mul i64 %token, %x_stride
  %xo = add i64 %xt, %within
  %xr = getelementptr float, ptr %x, i64 %xo
  %yt = mul i64 %token, %y_stride
  %yo = add i64 %yt, %within
  %yr = getelementptr float, ptr %y, i64 %yo
  br label %add
add:
  %k = phi i64 [0, %work], [%k_next, %add]
  %sum = phi {vector} [zeroinitializer, %work], [%sum_next, %add]
  %kp = getelementptr float, ptr %xr, i64 %k
  %v = load {vector}, ptr %kp, align 4
  %sum_next = call {vector} @llvm.fma.v{lanes}f32({vector} %v, {vector} %v, {vector} %sum)
  %k_next = add i64 %k, {lanes}
  %k_more = icmp ult i64 %k_next, %numbers
  br i1 %k_more, label %add, label %whole
whole:
  %total = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, {vector} %sum_next)
  %count = uitofp i64 %numbers to float
  %mean = fdiv float %total, %count
  %square = fadd float %mean, %eps
  %root = call float @llvm.sqrt.f32(float %square)
  %scale = fdiv float 1.0, %root
  {spread("%scales", "%scale", lanes)}
  {_loop(lanes, "whole", {"%a": "%xr", "%b": "%w"}, computed, "%yr", "part_end")}
"""
    arguments = (
        "ptr %x, ptr %w, ptr %constant, ptr %y, i64 %numbers, i64 %heads, i64 %x_stride, "
        "i64 %y_stride"
    )
    return shared("norm", arguments, body)


def _add(lanes: int) -> str:
    computed = f"%r = fadd <{lanes} x float> %a, %b"
    body = f"""
  %xo = mul i64 %part, %x_stride
  %xr = getelementptr float, ptr %x, i64 %xo
  %yo = mul i64 %part, %y_stride
  %yr = getelementptr float, ptr %y, i64 %yo
  %to = mul i64 %part, %stride
  %rr = getelementptr float, ptr %results, i64 %to
  {_loop(lanes, "work", {"%a": "%xr", "%b": "%yr"}, computed, "%rr", "part_end")}
"""
    arguments = (
        "ptr %x, ptr %y, ptr %results, i64 %numbers, i64 %x_stride, i64 %y_stride, i64 %stride"
    )
    return shared("add", arguments, body)


def _scale(lanes: int) -> str:
    vector, _integers = f"<{lanes} x float>", f"<{lanes} x i32>"
    body = f"""
  %one_factor = load float, ptr %constant, align 4
  {spread("%factor", "%one_factor", lanes)}
  %xo = mul i64 %part, %x_stride
  %xr = getelementptr float, ptr %x, i64 %xo
  %yo = mul i64 %part, %y_stride
  %yr = getelementptr float, ptr %y, i64 %yo
  {_loop(lanes, "work", {"%a": "%xr"}, f"%r = fmul {vector} %a, %factor", "%yr", "part_end")}
"""
    arguments = "ptr %x, ptr %constant, ptr %y, i64 %numbers, i64 %x_stride, i64 %y_stride"
    return shared("scale", arguments, body)


def _scatter(lanes: int, kind: str) -> str:
    vector = f"<{lanes} x float>"
    lines, loaded = "", "%r"
    if kind == "half":
        largest, least = splat(LARGEST_HALF, lanes), splat(-LARGEST_HALF, lanes)
        loaded = "%v"
        lines = f"""
  %large = fcmp ogt {vector} %v, {largest}
  %low = select <{lanes} x i1> %large, {vector} {largest}, {vector} %v
  %small = fcmp olt {vector} %low, {least}
  %within = select <{lanes} x i1> %small, {vector} {least}, {vector} %low
  %r = fptrunc {vector} %within to <{lanes} x half>
"""
    body = f"""
  %row.at = getelementptr i64, ptr %rows, i64 %part
  %row = load i64, ptr %row.at, align 8
  %column.at = getelementptr i64, ptr %columns, i64 %part
  %column = load i64, ptr %column.at, align 8
  %ro = mul i64 %row, %row_stride
  %co = mul i64 %column, %column_stride
  %to = add i64 %ro, %co
  %yr = getelementptr {kind}, ptr %y, i64 %to
  %from = mul i64 %part, %stride
  %xr = getelementptr float, ptr %x, i64 %from
  br label %head
head:
  %h = phi i64 [0, %work], [%h_next, %head_end]
  %xo = mul i64 %h, %numbers
  %xh = getelementptr float, ptr %xr, i64 %xo
  %yo = mul i64 %h, %head_stride
  %yh = getelementptr {kind}, ptr %yr, i64 %yo
  {_loop(lanes, "head", {loaded: "%xh"}, lines, "%yh", "head_end", kind)}
head_end:
  %h_next = add i64 %h, 1
  %h_more = icmp ult i64 %h_next, %heads
  br i1 %h_more, label %head, label %part_end
"""
    arguments = (
        "ptr %x, ptr %y, ptr %rows, ptr %columns, i64 %heads, i64 %numbers, i64 %stride, "
        "i64 %row_stride, i64 %head_stride, i64 %column_stride"
    )
    return shared("scatter" if kind == "float" else "scatter_half", arguments, body)


def _rotate(lanes: int) -> str:
    vector = f"<{lanes} x float>"
    body = f"""
  %from = mul i64 %part, %stride
  %xr = getelementptr float, ptr %x, i64 %from
  %angle = mul i64 %part, %half
  %cr = getelementptr float, ptr %cosines, i64 %angle
  %sr = getelementptr float, ptr %sines, i64 %angle
  %dim = mul i64 %half, 2
  %size = mul i64 %dim, %heads
  %to = mul i64 %part, %size
  %yr = getelementptr float, ptr %y, i64 %to
  br label %head
head:
  %h = phi i64 [0, %work], [%h_next, %head_end]
  %ho = mul i64 %h, %dim
  %xh = getelementptr float, ptr %xr, i64 %ho
  %yh = getelementptr float, ptr %yr, i64 %ho
  %xh2 = getelementptr float, ptr %xh, i64 %half
  %yh2 = getelementptr float, ptr %yh, i64 %half
  br label %loop
loop:
  %i = phi i64 [0, %head], [%i_next, %loop]
  %cp = getelementptr float, ptr %cr, i64 %i
  %c = load {vector}, ptr %cp, align 4
  %sp = getelementptr float, ptr %sr, i64 %i
  %s = load {vector}, ptr %sp, align 4
  %fp = getelementptr float, ptr %xh, i64 %i
  %first = load {vector}, ptr %fp, align 4
  %ep = getelementptr float, ptr %xh2, i64 %i
  %second = load {vector}, ptr %ep, align 4
  %fc = fmul {vector} %first, %c
  %es = fmul {vector} %second, %s
  %low = fsub {vector} %fc, %es
  %fs = fmul {vector} %first, %s
  %ec = fmul {vector} %second, %c
  %high = fadd {vector} %fs, %ec
  %lp = getelementptr float, ptr %yh, i64 %i
  store {vector} %low, ptr %lp, align 4
  %hp = getelementptr float, ptr %yh2, i64 %i
  store {vector} %high, ptr %hp, align 4
  %i_next = add i64 %i, {lanes}
  %more = icmp ult i64 %i_next, %half
  br i1 %more, label %loop, label %head_end
head_end:
  %h_next = add i64 %h, 1
  %h_more = icmp ult i64 %h_next, %heads
  br i1 %h_more, label %head, label %part_end
"""
    arguments = "ptr %x, ptr %cosines, ptr %sines, ptr %y, i64 %heads, i64 %half, i64 %stride"
    return shared("rotate", arguments, body)
