"""Tiles in LLVM's language: a block of inputs of one panel, multiplied by some tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.engine.cpu.compiled.llvm.attention import WIDE
from chairlift.engine.cpu.compiled.llvm.lanes import spread


def tile(
    kind: str,
    lanes: int,
    tokens: int,
    begin: Callable[[Sequence[str]], list[str]],
    end: Sequence[str],
    more: str = "",
) -> str:
    """A function that adds a block of inputs to the sums of some tokens and one panel.

    Its arguments are the addresses of the block, of the tokens and of their results, the inputs of
    a token, those of the block, the stride of the results, a step that ``begin`` uses, and whether
    the block is the first.

    Args:
        kind: that of the weights; the function is named by it and by the number of tokens.
        begin: begins a loop in which ``%i`` is an input and ``%w0``, ``%w1`` ... are its weights.
            It carries the sums with the given names: ``%b`` and the name before the loop, ``%s`` in
            it, ``%n`` after one more input.
        end: ends the loop, before ``%end``.
        more: further arguments.
    """
    vector = f"<{lanes} x float>"
    sums = [(f"{token}_{wide}", token, wide) for token in range(tokens) for wide in range(WIDE)]
    lines = [
        f"define internal void @{kind}_{tokens}(ptr %w, ptr %x, ptr %y, i64 %inputs, "
        f"i64 %count, i64 %stride, i64 %step, i1 %first{more}) {{",
        "entry:",
    ]
    for token in range(tokens):
        lines += [
            f"%xo{token} = mul i64 %inputs, {token}",
            f"%x{token} = getelementptr float, ptr %x, i64 %xo{token}",
            f"%yo{token} = mul i64 %stride, {token}",
            f"%y{token} = getelementptr float, ptr %y, i64 %yo{token}",
        ]
    for name, token, wide in sums:
        lines += [
            f"%p{name} = getelementptr {vector}, ptr %y{token}, i64 {wide}",
            f"%l{name} = load {vector}, ptr %p{name}, align 4",
            f"%b{name} = select i1 %first, {vector} zeroinitializer, {vector} %l{name}",
        ]
    lines += begin([name for name, _, _ in sums])
    for token in range(tokens):
        lines += [
            f"%xp{token} = getelementptr float, ptr %x{token}, i64 %i",
            f"%v{token} = load float, ptr %xp{token}, align 4",
            spread(f"%a{token}", f"%v{token}", lanes),
        ]
    lines += [
        f"%n{name} = call {vector} @llvm.fma.v{lanes}f32({vector} %a{token}, "
        f"{vector} %w{wide}, {vector} %s{name})"
        for name, token, wide in sums
    ]
    lines += end
    lines += [f"store {vector} %n{name}, ptr %p{name}, align 4" for name, _, _ in sums]
    return "\n".join([*lines, "ret void", "}"])
