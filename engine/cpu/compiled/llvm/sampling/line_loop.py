"""Loops over the numbers of a line, for functions in LLVM's language.

A loop's body is written twice: for full registers, and masked for the numbers that are left at the
end. LLVM's names are unique, so the variables of each have an ending of their own (``Pass.end``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm import lanes
from chairlift.engine.cpu.compiled.llvm.lanes import splat

# Numbers of a register; LLVM uses several registers where the CPU's are shorter.
LANES = 32
FLOATS, INTEGERS, FLAGS = f"<{LANES} x float>", f"<{LANES} x i32>", f"<{LANES} x i1>"
# What ``loop`` calls.
DECLARED = f"""
declare {FLOATS} @llvm.masked.load.v{LANES}f32.p0(ptr, i32, {FLAGS}, {FLOATS})
declare void @llvm.masked.store.v{LANES}f32.p0({FLOATS}, ptr, i32, {FLAGS})
"""


class Pass(NamedTuple):
    """Some numbers of a loop: all of a register, or those that are left.

    Attributes:
        end: what the names of its variables end with.
        before: what the names of the states before it end with.
        masked: whether only the lanes of ``%rest.mask`` have numbers.
    """

    end: str
    before: str
    masked: bool

    @property
    def first(self) -> str:
        """The number of the first lane."""
        return f"%i{self.end}"

    def state(self, name: str) -> str:
        """The variable with a state before this pass."""
        return f"%{name}{self.before}"

    def load(self, name: str, base: str, default: float, index: str = "") -> str:
        """Loads ``%name`` from float32 numbers; lanes without a number get the default."""
        end = self.end
        at = f"%{name}.at{end} = getelementptr float, ptr {base}, i64 {index or self.first}\n"
        if not self.masked:
            return f"{at}%{name}{end} = load {FLOATS}, ptr %{name}.at{end}, align 4\n"
        return at + (
            f"%{name}{end} = call {FLOATS} @llvm.masked.load.v{LANES}f32.p0(ptr %{name}.at{end}, "
            f"i32 4, {FLAGS} %rest.mask, {FLOATS} {splat(default, LANES)})\n"
        )

    def store(self, value: str, name: str, base: str, index: str = "") -> str:
        """Stores a register to float32 numbers."""
        end = self.end
        at = f"%{name}.to{end} = getelementptr float, ptr {base}, i64 {index or self.first}\n"
        if not self.masked:
            return f"{at}store {FLOATS} {value}, ptr %{name}.to{end}, align 4\n"
        return at + (
            f"call void @llvm.masked.store.v{LANES}f32.p0({FLOATS} {value}, ptr %{name}.to{end}, "
            f"i32 4, {FLAGS} %rest.mask)\n"
        )


def loop(
    start: str,
    stop: str,
    states: dict[str, tuple[str, str]],
    body: Callable[[Pass], str],
) -> str:
    """Visits the numbers from ``start`` to before ``stop``, a register at a time.

    It follows the block ``work``, as the first loop of a job's body (``llvm.jobs.shared``).

    Args:
        states: types and first values by name. Afterwards they are ``%NAME.all``.
        body: for a pass, the lines that compute each ``%NAME.next`` with the pass's ending.
    """
    whole = body(Pass("", "", masked=False))
    rest = body(Pass(".rest", ".whole", masked=True))

    def phis(ending: str, *sources: tuple[Callable[[str, str], str], str]) -> str:
        lines = []
        for name, (kind, first) in states.items():
            given = ", ".join(f"[{value(name, first)}, %{label}]" for value, label in sources)
            lines.append(f"%{name}{ending} = phi {kind} {given}")
        return "\n".join(lines)

    def first(_: str, value: str) -> str:
        return value

    def named(ending: str) -> Callable[[str, str], str]:
        return lambda name, _: f"%{name}{ending}"

    return f"""
  %rest.count.all = sub i64 {stop}, {start}
  %rest.count = and i64 %rest.count.all, {LANES - 1}
  %i.rest = sub i64 {stop}, %rest.count
  %whole.some = icmp ult i64 {start}, %i.rest
  br i1 %whole.some, label %loop, label %last
loop:
  %i = phi i64 [{start}, %work], [%i.next, %loop]
  {phis("", (first, "work"), (named(".next"), "loop"))}
  {whole}
  %i.next = add i64 %i, {LANES}
  %i.more = icmp ult i64 %i.next, %i.rest
  br i1 %i.more, label %loop, label %last
last:
  {phis(".whole", (first, "work"), (named(".next"), "loop"))}
  %rest.some = icmp ne i64 %rest.count, 0
  br i1 %rest.some, label %tail, label %end
tail:
  %rest.one = trunc i64 %rest.count to i32
  {spread("%rest.counts", "%rest.one", "i32")}
  %rest.mask = icmp ult {INTEGERS} {lane_numbers()}, %rest.counts
  {rest}
  br label %end
end:
  {phis(".all", (named(".whole"), "last"), (named(".next.rest"), "tail"))}
"""


def lane_numbers() -> str:
    """A register of 0, 1, 2 and so on."""
    return "<" + ", ".join(f"i32 {lane}" for lane in range(LANES)) + ">"


def equal(value: int) -> str:
    """A register of equal integers."""
    return "<" + ", ".join([f"i32 {value}"] * LANES) + ">"


def spread(name: str, value: str, kind: str) -> str:
    """See ``lanes.spread``."""
    return lanes.spread(name, value, LANES, kind)


def read(name: str, array: str, index: str, kind: str) -> str:
    """Reads one number of an array."""
    return (
        f"{name}.at = getelementptr {kind}, ptr {array}, i64 {index}\n"
        f"{name} = load {kind}, ptr {name}.at, align 4\n"
    )


def places(each: Pass) -> str:
    """``%place``: where in the line the number of each lane is."""
    end = each.end
    return (
        f"%place.one{end} = trunc i64 {each.first} to i32\n"
        f"{spread(f'%place.begin{end}', f'%place.one{end}', 'i32')}"
        f"%place{end} = add {INTEGERS} %place.begin{end}, {lane_numbers()}\n"
    )
