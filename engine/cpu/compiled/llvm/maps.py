"""Elementwise functions of arrays with any strides, and sums of lines, in LLVM's language.

A line is the last axis; a part is one line. Lines have up to three further axes. Arguments of all
functions: the addresses of the inputs and of the result, the numbers of a line, and the sizes of
the second and the third axis; then, for each input and for the result, the numbers from one place
of each of the three axes to the next one.

- Functions of one number, such as ``square_lines``: the numbers of a line are adjacent.
- Functions of two numbers: an input may have one number for each line. The names say so:
  ``add_lines``, ``add_left`` (the first input has one number) and ``add_right``.
- ``sum``: the result has one number for each line. Numbers are added in an order that depends on
  nothing but the length of a line.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm import kernel, softmax
from chairlift.engine.cpu.compiled.llvm.elementwise import gelu_argument, sigmoid
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import splat, spread

# Axes of an array beside its last one.
OUTER = 3
ENDINGS = ("lines", "left", "right")
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
UNARY = (
    *("copy", "negative", "absolute", "square", "cube", "root", "inverse_root", "sigmoid"),
    *("tanh", "silu", "gelu_approx"),
)


class Maps(NamedTuple):
    """The compiled functions by name."""

    functions: Mapping[str, Function]


@functools.cache
def compiled() -> Maps | None:
    """The functions for this CPU; None if there is no ``llvm.kernel``."""
    compiler, main = host_compiler(), kernel.compiled()
    if compiler is None or main is None:
        return None
    module = compiler.compile(_source(main.lanes))
    names = [f"{name}_{ending}" for name in BINARY for ending in ENDINGS]
    names += [f"{name}_{ENDINGS[0]}" for name in UNARY]
    return Maps({name: module.function(name) for name in (*names, "sum")})


def _source(lanes: int) -> str:
    vector = f"<{lanes} x float>"
    masks = f"<{lanes} x i1>"
    parts = [
        f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})",
        f"declare {vector} @llvm.fabs.v{lanes}f32({vector})",
        f"declare {vector} @llvm.sqrt.v{lanes}f32({vector})",
        f"declare {vector} @llvm.masked.load.v{lanes}f32.p0(ptr, i32, {masks}, {vector})",
        f"declare void @llvm.masked.store.v{lanes}f32.p0({vector}, ptr, i32, {masks})",
        f"declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {vector})",
        softmax.exponential(lanes),
        sigmoid(lanes),
        softmax.tangent(lanes),
        *(_defined(name, lines, lanes) for name, lines in _operations(lanes).items()),
    ]
    parts += [_unary(name, lanes) for name in UNARY]
    parts += [_binary(name, ending, lanes) for name in BINARY for ending in ENDINGS]
    parts.append(_sum(lanes))
    return "\n".join(parts)


def _operations(lanes: int) -> dict[str, list[str]]:
    """The lines that compute ``%r`` of ``%a`` and ``%b``, for each operation."""
    vector, masks = f"<{lanes} x float>", f"<{lanes} x i1>"
    return {
        "copy": [f"%r = fadd {vector} %a, {splat(-0.0, lanes)}"],
        "negative": [f"%r = fneg {vector} %a"],
        "absolute": [f"%r = call {vector} @llvm.fabs.v{lanes}f32({vector} %a)"],
        "square": [f"%r = fmul {vector} %a, %a"],
        "cube": [f"%squared = fmul {vector} %a, %a", f"%r = fmul {vector} %squared, %a"],
        "root": [f"%r = call {vector} @llvm.sqrt.v{lanes}f32({vector} %a)"],
        "inverse_root": [
            f"%root = call {vector} @llvm.sqrt.v{lanes}f32({vector} %a)",
            f"%r = fdiv {vector} {splat(1.0, lanes)}, %root",
        ],
        "sigmoid": [f"%r = call {vector} @sigmoid({vector} %a)"],
        "tanh": [f"%r = call {vector} @tangent({vector} %a)"],
        "silu": [f"%s = call {vector} @sigmoid({vector} %a)", f"%r = fmul {vector} %a, %s"],
        "gelu_approx": [
            *gelu_argument(lanes, "%a", "%z"),
            f"%s = call {vector} @sigmoid({vector} %z)",
            f"%r = fmul {vector} %a, %s",
        ],
        "add": [f"%r = fadd {vector} %a, %b"],
        "subtract": [f"%r = fsub {vector} %a, %b"],
        "multiply": [f"%r = fmul {vector} %a, %b"],
        "divide": [f"%r = fdiv {vector} %a, %b"],
        # NaN if one of them is.
        **{
            name: [
                f"%nan = fcmp uno {vector} %a, %a",
                f"%beyond = fcmp {comparison} {vector} %a, %b",
                f"%first = or {masks} %nan, %beyond",
                f"%r = select {masks} %first, {vector} %a, {vector} %b",
            ]
            for name, comparison in (("maximum", "ogt"), ("minimum", "olt"))
        },
    }


def _defined(name: str, lines: list[str], lanes: int) -> str:
    vector = f"<{lanes} x float>"
    body = "\n  ".join(lines)
    return f"""
define internal {vector} @of_{name}({vector} %a, {vector} %b) alwaysinline {{
  {body}
  ret {vector} %r
}}
"""


def _unary(name: str, lanes: int) -> str:
    lines = _line_of("x") + _line_of("y")
    body = lines + _loop(name, {"a": "x"}, "%a", "%a", "y", lanes)
    return shared(f"{name}_{ENDINGS[0]}", _arguments("x", "y"), _places() + body)


def _binary(name: str, ending: str, lanes: int) -> str:
    body = "".join(map(_line_of, "xyz"))
    arrays = {"a": "x", "b": "y"}
    single = {"left": "a", "right": "b"}.get(ending)
    if single is not None:
        body += _splat(f"%{single}", arrays.pop(single), lanes)
    body += _loop(name, arrays, "%a", "%b", "z", lanes)
    return shared(f"{name}_{ending}", _arguments("x", "y", "z"), _places() + body)


def _loop(
    name: str, arrays: Mapping[str, str], left: str, right: str, result: str, lanes: int
) -> str:
    """Computes an operation for each register of a line, and for the numbers that are left.

    Args:
        arrays: the arrays from which variables are loaded.
        left, right: the operation's arguments.
        result: the array of the results.
    """
    vector = f"<{lanes} x float>"
    loads = "".join(_loaded(variable, array, lanes) for variable, array in arrays.items())
    rests = "".join(_rest(variable, array, lanes) for variable, array in arrays.items())

    def of_rest(argument: str) -> str:
        return f"{argument}.rest" if argument[1:] in arrays else argument

    return f"""
  {_ends(lanes)}
  br i1 %some, label %loop, label %last
loop:
  %i = phi i64 [0, %work], [%i_next, %loop]
  {loads}
  %r = call {vector} @of_{name}({vector} {left}, {vector} {right})
  %r.at = getelementptr float, ptr %{result}.line, i64 %i
  store {vector} %r, ptr %r.at, align 4
  %i_next = add i64 %i, {lanes}
  %more = icmp ult i64 %i_next, %whole
  br i1 %more, label %loop, label %last
last:
  br i1 %rest, label %tail, label %part_end
tail:
  {_mask(lanes)}
  {rests}
  %r.rest = call {vector} @of_{name}({vector} {of_rest(left)}, {vector} {of_rest(right)})
  %r.to = getelementptr float, ptr %{result}.line, i64 %whole
  call void @llvm.masked.store.v{lanes}f32.p0({vector} %r.rest, ptr %r.to, i32 4, \
<{lanes} x i1> %mask)
  br label %part_end
"""


def _sum(lanes: int) -> str:
    vector, begin = f"<{lanes} x float>", splat(0.0, lanes)
    body = f"""
  {_line_of("x")}
  {_line_of("y")}
  {_ends(lanes)}
  br i1 %some, label %loop, label %last
loop:
  %i = phi i64 [0, %work], [%i_next, %loop]
  %s = phi {vector} [{begin}, %work], [%s_next, %loop]
  {_loaded("a", "x", lanes)}
  %s_next = call {vector} @of_add({vector} %s, {vector} %a)
  %i_next = add i64 %i, {lanes}
  %more = icmp ult i64 %i_next, %whole
  br i1 %more, label %loop, label %last
last:
  %s_whole = phi {vector} [{begin}, %work], [%s_next, %loop]
  br i1 %rest, label %tail, label %end
tail:
  {_mask(lanes)}
  {_rest("a", "x", lanes)}
  %s_rest = call {vector} @of_add({vector} %s_whole, {vector} %a.rest)
  br label %end
end:
  %all = phi {vector} [%s_whole, %last], [%s_rest, %tail]
  %total = call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, {vector} %all)
  store float %total, ptr %y.line, align 4
  br label %part_end
"""
    return shared("sum", _arguments("x", "y"), _places() + body)


def _loaded(variable: str, array: str, lanes: int) -> str:
    """Loads a register of an array's line, at ``%i``."""
    return f"""
  %{variable}.at = getelementptr float, ptr %{array}.line, i64 %i
  %{variable} = load <{lanes} x float>, ptr %{variable}.at, align 4
"""


def _rest(variable: str, array: str, lanes: int) -> str:
    """Loads the numbers of a line that are left; the lanes without one get 0."""
    vector = f"<{lanes} x float>"
    return f"""
  %{variable}.end = getelementptr float, ptr %{array}.line, i64 %whole
  %{variable}.rest = call {vector} @llvm.masked.load.v{lanes}f32.p0(ptr %{variable}.end, i32 4, \
<{lanes} x i1> %mask, {vector} zeroinitializer)
"""


def _arguments(*arrays: str) -> str:
    strides = [f"i64 %{array}{axis}" for array in arrays for axis in range(OUTER)]
    return ", ".join([*(f"ptr %{a}" for a in arrays), "i64 %numbers, i64 %n1, i64 %n2", *strides])


def _places() -> str:
    """The places of a line: ``%i0`` to ``%i2``."""
    return """
  %i2 = urem i64 %part, %n2
  %part.above = udiv i64 %part, %n2
  %i1 = urem i64 %part.above, %n1
  %i0 = udiv i64 %part.above, %n1
"""


def _line_of(array: str) -> str:
    """The address of an array's line."""
    return f"""
  %{array}.o0 = mul i64 %i0, %{array}0
  %{array}.o1 = mul i64 %i1, %{array}1
  %{array}.o2 = mul i64 %i2, %{array}2
  %{array}.o3 = add i64 %{array}.o0, %{array}.o1
  %{array}.o = add i64 %{array}.o3, %{array}.o2
  %{array}.line = getelementptr float, ptr %{array}, i64 %{array}.o
"""


def _splat(variable: str, array: str, lanes: int) -> str:
    """A register of the one number of an array's line."""
    return f"""
  {variable}.one = load float, ptr %{array}.line, align 4
  {spread(variable, f"{variable}.one", lanes)}
"""


def _ends(lanes: int) -> str:
    """``%whole``: the numbers that fill registers; whether there are some, and others."""
    return f"""
  %whole = and i64 %numbers, {-lanes}
  %some = icmp ne i64 %whole, 0
  %rest = icmp ne i64 %whole, %numbers
"""


def _mask(lanes: int) -> str:
    """``%mask``: the lanes of the last register that have a number."""
    integers = f"<{lanes} x i32>"
    counted = ", ".join(f"i32 {lane}" for lane in range(lanes))
    return f"""
  %left = sub i64 %numbers, %whole
  %left.one = trunc i64 %left to i32
  %left.first = insertelement {integers} poison, i32 %left.one, i32 0
  %left.all = shufflevector {integers} %left.first, {integers} poison, {integers} zeroinitializer
  %mask = icmp ult {integers} <{counted}>, %left.all
"""
