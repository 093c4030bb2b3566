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
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm import kernel as llvm_kernel
from chairlift.engine.cpu.compiled.llvm.host_compiler import Function, host_compiler
from chairlift.engine.cpu.compiled.llvm.jobs import shared

_ARGUMENTS = (
    "ptr %state, ptr %k, ptr %q, ptr %v, ptr %g, ptr %beta, ptr %y, i64 %tokens, i64 %heads, "
    "i64 %share, i64 %lines, i64 %numbers, i64 %decays"
)


class RecurrenceKernel(NamedTuple):
    """The compiled functions, of jobs that several threads may share; see ``llvm.jobs``.

    Attributes:
        lanes: numbers of a register; those of a line are a multiple of them.
    """

    lanes: int
    decayed: Function
    delta: Function


@functools.cache
def compiled() -> RecurrenceKernel | None:
    """The kernel for this CPU; None if ``llvm.kernel`` has none."""
    compiler, kernel = host_compiler(), llvm_kernel.compiled()
    if compiler is None or kernel is None:
        return None
    function = compiler.compile(source(kernel.lanes)).function
    return RecurrenceKernel(kernel.lanes, *map(function, ("decayed", "delta")))


def source(lanes: int) -> str:
    """All functions, for registers of ``lanes`` numbers."""
    vector = f"<{lanes} x float>"
    return "\n".join(
        [
            f"declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})",
            f"declare float @llvm.vector.reduce.fadd.v{lanes}f32(float, {vector})",
            _head("decayed", lanes),
            _head("delta", lanes),
        ]
    )


def _head(name: str, lanes: int) -> str:
    """A function of heads, and one that computes a head."""
    passed = f"call void @{name}_head({_ARGUMENTS}, i64 %part)\nbr label %part_end"
    vector, is_delta = f"<{lanes} x float>", name == "delta"
    fma = f"call {vector} @llvm.fma.v{lanes}f32"
    total = f"call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, {vector}"
    # The products with the key correct what is added.
    known = recalled = ""
    added = "%d = load float, ptr %v_at, align 4"
    if is_delta:
        known = f"""
  %a = phi {vector} [zeroinitializer, %line], [%a_next, %dots]
  %gk_at = getelementptr float, ptr %gk, i64 %j
  %gk_j = load {vector}, ptr %gk_at, align 4
  %a_next = {fma}({vector} %s, {vector} %gk_j, {vector} %a)
"""
        recalled = f"""
  %recalled = {total} %a_next)
  %v_i = load float, ptr %v_at, align 4
  %wrong = fsub float %v_i, %recalled
"""
        added = "%d = fmul float %wrong, %rate"
    phi, *loads = known.strip().split("\n") if known else ("",)
    return f"""
define internal void @{name}_head({_ARGUMENTS}, i64 %part) {{
entry:
  %row = udiv i64 %part, %heads
  %head = urem i64 %part, %heads
  %groups = udiv i64 %heads, %share
  %group = udiv i64 %head, %share
  %state_lines = mul i64 %part, %lines
  %state_o = mul i64 %state_lines, %numbers
  %sh = getelementptr float, ptr %state, i64 %state_o
  %first_token = mul i64 %row, %tokens
  %gs = alloca float, i64 %numbers, align 64
  %gk = alloca float, i64 %numbers, align 64
  %gq = alloca float, i64 %numbers, align 64
  %is_single = icmp eq i64 %decays, 1
  br label %token
token:
  %t = phi i64 [0, %entry], [%t_next, %token_end]
  %tt = add i64 %first_token, %t
  %token_group = mul i64 %tt, %groups
  %key = add i64 %token_group, %group
  %key_o = mul i64 %key, %numbers
  %kh = getelementptr float, ptr %k, i64 %key_o
  %qh = getelementptr float, ptr %q, i64 %key_o
  %token_head = mul i64 %tt, %heads
  %place = add i64 %token_head, %head
  %value_o = mul i64 %place, %lines
  %vh = getelementptr float, ptr %v, i64 %value_o
  %yh = getelementptr float, ptr %y, i64 %value_o
  %decay_o = mul i64 %place, %decays
  %gh = getelementptr float, ptr %g, i64 %decay_o
  {"%rate_at = getelementptr float, ptr %beta, i64 %place" if is_delta else ""}
  {"%rate = load float, ptr %rate_at, align 4" if is_delta else ""}
  %g_first = load float, ptr %gh, align 4
  %g_one = insertelement {vector} poison, float %g_first, i32 0
  %g_all = shufflevector {vector} %g_one, {vector} poison, <{lanes} x i32> zeroinitializer
  br label %prepare
prepare:
  %i = phi i64 [0, %token], [%i_next, %prepared]
  %kq = phi {vector} [zeroinitializer, %token], [%kq_next, %prepared]
  br i1 %is_single, label %prepared, label %own
own:
  %g_at = getelementptr float, ptr %gh, i64 %i
  %g_own = load {vector}, ptr %g_at, align 4
  br label %prepared
prepared:
  %g_i = phi {vector} [%g_all, %prepare], [%g_own, %own]
  %k_at = getelementptr float, ptr %kh, i64 %i
  %k_i = load {vector}, ptr %k_at, align 4
  %q_at = getelementptr float, ptr %qh, i64 %i
  %q_i = load {vector}, ptr %q_at, align 4
  %kq_next = {fma}({vector} %k_i, {vector} %q_i, {vector} %kq)
  %gk_i = fmul {vector} %g_i, %k_i
  %gq_i = fmul {vector} %g_i, %q_i
  %gs_to = getelementptr float, ptr %gs, i64 %i
  store {vector} %g_i, ptr %gs_to, align 4
  %gk_to = getelementptr float, ptr %gk, i64 %i
  store {vector} %gk_i, ptr %gk_to, align 4
  %gq_to = getelementptr float, ptr %gq, i64 %i
  store {vector} %gq_i, ptr %gq_to, align 4
  %i_next = add i64 %i, {lanes}
  %i_more = icmp ult i64 %i_next, %numbers
  br i1 %i_more, label %prepare, label %begin
begin:
  %own_product = {total} %kq_next)
  br label %line
line:
  %n = phi i64 [0, %begin], [%n_next, %line_end]
  %line_o = mul i64 %n, %numbers
  %s_line = getelementptr float, ptr %sh, i64 %line_o
  %v_at = getelementptr float, ptr %vh, i64 %n
  br label %dots
dots:
  %j = phi i64 [0, %line], [%j_next, %dots]
  %b = phi {vector} [zeroinitializer, %line], [%b_next, %dots]
  {phi}
  %s_at = getelementptr float, ptr %s_line, i64 %j
  %s = load {vector}, ptr %s_at, align 4
  %gq_at = getelementptr float, ptr %gq, i64 %j
  %gq_j = load {vector}, ptr %gq_at, align 4
  %b_next = {fma}({vector} %s, {vector} %gq_j, {vector} %b)
  {chr(10).join(loads)}
  %j_next = add i64 %j, {lanes}
  %j_more = icmp ult i64 %j_next, %numbers
  br i1 %j_more, label %dots, label %middle
middle:
  {recalled}
  {added}
  %earlier = {total} %b_next)
  %now = fmul float %d, %own_product
  %out = fadd float %earlier, %now
  %y_at = getelementptr float, ptr %yh, i64 %n
  store float %out, ptr %y_at, align 4
  %d_one = insertelement {vector} poison, float %d, i32 0
  %d_all = shufflevector {vector} %d_one, {vector} poison, <{lanes} x i32> zeroinitializer
  br label %change
change:
  %m = phi i64 [0, %middle], [%m_next, %change]
  %sm_at = getelementptr float, ptr %s_line, i64 %m
  %sm = load {vector}, ptr %sm_at, align 4
  %gm_at = getelementptr float, ptr %gs, i64 %m
  %gm = load {vector}, ptr %gm_at, align 4
  %km_at = getelementptr float, ptr %kh, i64 %m
  %km = load {vector}, ptr %km_at, align 4
  %kept = fmul {vector} %sm, %gm
  %changed = {fma}({vector} %d_all, {vector} %km, {vector} %kept)
  store {vector} %changed, ptr %sm_at, align 4
  %m_next = add i64 %m, {lanes}
  %m_more = icmp ult i64 %m_next, %numbers
  br i1 %m_more, label %change, label %line_end
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
{shared(name, _ARGUMENTS, passed)}
"""
