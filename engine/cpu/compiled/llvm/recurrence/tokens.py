"""What a token of a recurrent layer needs before its lines, in LLVM's language.

``kernel`` and ``blocks`` have it in common.
"""

from __future__ import annotations

from chairlift.engine.cpu.compiled.llvm.lanes import spread

ARGUMENTS = (
    "ptr %state, ptr %k, ptr %q, ptr %v, ptr %g, ptr %beta, ptr %y, i64 %tokens, i64 %heads, "
    "i64 %share, i64 %lines, i64 %numbers, i64 %decays"
)


def prepared(name: str, lanes: int) -> str:
    """The blocks ``token`` to ``begin``: what all lines of a token ``%t`` share.

    The products of ``k`` and of ``q`` with the decays, which are copied, and that of both.
    """
    vector, is_delta = f"<{lanes} x float>", name == "delta"
    fma = f"call {vector} @llvm.fma.v{lanes}f32"
    return f"""
token:
  %t = phi i64 [0, %ready], [%t_next, %token_end]
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
  {spread("%g_all", "%g_first", lanes)}
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
  %own_product = {total(lanes)} %kq_next)
"""


def total(lanes: int) -> str:
    """The beginning of a call that adds the lanes of a register: halves, quarters and so on."""
    vector = f"<{lanes} x float>"
    return f"call reassoc float @llvm.vector.reduce.fadd.v{lanes}f32(float 0.0, {vector}"


def head_of_part(part: str) -> str:
    """Where the tokens of a head are; ``part`` counts the heads of all rows."""
    return f"""
  %row = udiv i64 {part}, %heads
  %head = urem i64 {part}, %heads
  %groups = udiv i64 %heads, %share
  %group = udiv i64 %head, %share
  %first_token = mul i64 %row, %tokens
  %gs = alloca float, i64 %numbers, align 64
  %gk = alloca float, i64 %numbers, align 64
  %gq = alloca float, i64 %numbers, align 64
  %is_single = icmp eq i64 %decays, 1
"""
