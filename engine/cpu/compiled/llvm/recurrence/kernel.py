"""Tokens of layers whose recurrent state decays, in LLVM's language.

The state of a head is lines of numbers, ``S[value, key]``, which a token reads and writes once. A
part of a call is one head of one row with all of its tokens, one after the other: so the results of
a row do not depend on the others, and the tokens of a prompt find the state in the cache.

- ``decayed``: ``S = S * g + v k^T``, and the output is ``S q``.
- ``delta``: the gated delta rule, ``S = S * g + (beta * (v - (S * g) k)) k^T``, and ``S q``.

The products of a line with ``g * k`` and ``g * q`` are computed before the line changes: with the
product of ``k`` and ``q`` they give its output. Arguments: the addresses of the states
``[rows, heads, lines, numbers]``, of ``k`` and ``q`` ``[rows, tokens, groups, numbers]``, of ``v``
``[rows, tokens, heads, lines]``, of ``g`` ``[rows, tokens, heads, 1]`` or
``[rows, tokens, heads, numbers]``, of ``beta`` ``[rows, tokens, heads]`` (``delta`` only) and of
the outputs, as ``v``; then tokens, heads, heads of a group, lines, numbers, and the numbers of a
head's ``g``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import spread
from chairlift.engine.cpu.compiled.llvm.recurrence.blocks import Form, block_function, declared
from chairlift.engine.cpu.compiled.llvm.recurrence.tokens import (
    ARGUMENTS,
    head_of_part,
    prepared,
    total,
)

# The registers of a block of ``llvm.recurrence.blocks``.
REGISTERS = (4, 1)
_NAMES = ("decayed", "delta")
# Tokens from which blocks take less time, with the copies of their states; and the most numbers of
# a block's state, which is on the stack.
MIN_TOKENS, MAX_BLOCK = 16, 1 << 15


class RecurrenceKernel(NamedTuple):
    """The compiled functions, of jobs that several threads may share; see ``llvm.jobs``.

    Attributes:
        lanes: numbers of a register; those of a line are a multiple of them.
        heads: by name; a part is a head.
        blocks: for many tokens, by name and the registers of a block; a part is a block.
    """

    lanes: int
    heads: Mapping[str, Function]
    blocks: Mapping[tuple[str, int], Function]

    def fastest(self, name: str, tokens: int, lines: int, numbers: int) -> tuple[Function, int]:
        """The function for so many tokens and such states, and the parts of a head."""
        for registers in REGISTERS if tokens >= MIN_TOKENS else ():
            width = registers * self.lanes
            if lines % width == 0 and width * numbers <= MAX_BLOCK:
                return self.blocks[name, registers], lines // width
        return self.heads[name], 1


@functools.cache
def compiled() -> RecurrenceKernel | None:
    """The kernel for this CPU; None if ``llvm.kernel`` has none."""
    compiler, kernel = host_compiler(), llvm_kernel.compiled()
    if compiler is None or kernel is None:
        return None
    function = compiler.compile(source(kernel.lanes)).function
    blocks = {(form.name, form.registers): function(form.job) for form in _forms(kernel.lanes)}
    return RecurrenceKernel(kernel.lanes, {name: function(name) for name in _NAMES}, blocks)


def source(lanes: int) -> str:
    """All functions, for registers of ``lanes`` numbers."""
    vector = f"<{lanes} x float>"
    return "\n".join(
        [
            f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})",
            f"declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {vector})",
            declared(lanes),
            *(_head(name, lanes) for name in _NAMES),
            *map(block_function, _forms(lanes)),
        ]
    )


def _forms(lanes: int) -> list[Form]:
    return [Form(name, lanes, registers) for name in _NAMES for registers in REGISTERS]


def _head(name: str, lanes: int) -> str:
    """A function of heads, and one that computes a head."""
    passed = f"call void @{name}_head({ARGUMENTS}, i64 %part)\nbr label %part_end"
    return f"""
define internal void @{name}_head({ARGUMENTS}, i64 %part) {{
entry:
  {head_of_part("%part")}
  %state_lines = mul i64 %part, %lines
  %state_o = mul i64 %state_lines, %numbers
  %sh = getelementptr float, ptr %state, i64 %state_o
  br label %ready
ready:
  br label %token
{prepared(name, lanes)}
  br label %line
line:
  %n = phi i64 [0, %begin], [%n_next, %line_end]
  %line_o = mul i64 %n, %numbers
  %s_line = getelementptr float, ptr %sh, i64 %line_o
  %v_at = getelementptr float, ptr %vh, i64 %n
  br label %dots
{_dots(name, lanes)}
{_output(name, lanes)}
{_change(lanes)}
line_end:
  %n_next = add i64 %n, 1
  %n_more = icmp ult i64 %n_next, %lines
  br i1 %n_more, label %line, label %token_end
token_end:
  %t_next = add i64 %t, 1
  %t_more = icmp ult i64 %t_next, %tokens
  br i1 %t_more, label %token, label %end
end:
  ret void
}}
{shared(name, ARGUMENTS, passed)}
"""


def _dots(name: str, lanes: int) -> str:
    """The products of a line with ``g * q``, and for ``delta`` with ``g * k``."""
    vector = f"<{lanes} x float>"
    fma = f"call {vector} @llvm.fma.v{lanes}f32"
    sum_with_key = add_key = ""
    if name == "delta":
        sum_with_key = f"%a = phi {vector} [zeroinitializer, %line], [%a_next, %dots]"
        add_key = f"""%gk_at = getelementptr float, ptr %gk, i64 %j
  %gk_j = load {vector}, ptr %gk_at, align 4
  %a_next = {fma}({vector} %s, {vector} %gk_j, {vector} %a)"""
    return f"""dots:
  %j = phi i64 [0, %line], [%j_next, %dots]
  %b = phi {vector} [zeroinitializer, %line], [%b_next, %dots]
  {sum_with_key}
  %s_at = getelementptr float, ptr %s_line, i64 %j
  %s = load {vector}, ptr %s_at, align 4
  %gq_at = getelementptr float, ptr %gq, i64 %j
  %gq_j = load {vector}, ptr %gq_at, align 4
  %b_next = {fma}({vector} %s, {vector} %gq_j, {vector} %b)
  {add_key}
  %j_next = add i64 %j, {lanes}
  %j_more = icmp ult i64 %j_next, %numbers
  br i1 %j_more, label %dots, label %middle"""


def _output(name: str, lanes: int) -> str:
    """What is added to a line, times the key: ``%d``; and the line's output."""
    added = "%d = load float, ptr %v_at, align 4"
    if name == "delta":
        # The product of the line with the key corrects what is added.
        added = f"""%recalled = {total(lanes)} %a_next)
  %v_i = load float, ptr %v_at, align 4
  %wrong = fsub float %v_i, %recalled
  %d = fmul float %wrong, %rate"""
    return f"""middle:
  {added}
  %earlier = {total(lanes)} %b_next)
  %now = fmul float %d, %own_product
  %out = fadd float %earlier, %now
  %y_at = getelementptr float, ptr %yh, i64 %n
  store float %out, ptr %y_at, align 4
  {spread("%d_all", "%d", lanes)}
  br label %change"""


def _change(lanes: int) -> str:
    """The line's new numbers: the old ones times ``g``, and ``%d`` times the key."""
    vector = f"<{lanes} x float>"
    return f"""change:
  %m = phi i64 [0, %middle], [%m_next, %change]
  %sm_at = getelementptr float, ptr %s_line, i64 %m
  %sm = load {vector}, ptr %sm_at, align 4
  %gm_at = getelementptr float, ptr %gs, i64 %m
  %gm = load {vector}, ptr %gm_at, align 4
  %km_at = getelementptr float, ptr %kh, i64 %m
  %km = load {vector}, ptr %km_at, align 4
  %kept = fmul {vector} %sm, %gm
  %changed = call {vector} @llvm.fma.v{lanes}f32({vector} %d_all, {vector} %km, {vector} %kept)
  store {vector} %changed, ptr %sm_at, align 4
  %m_next = add i64 %m, {lanes}
  %m_more = icmp ult i64 %m_next, %numbers
  br i1 %m_more, label %change, label %line_end"""
