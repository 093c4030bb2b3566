"""Many tokens of layers whose recurrent state decays, in LLVM's language.

The functions have the arguments of those in ``kernel``, and give the same numbers to the last bit.
A part is a block of a head's lines with all of its tokens. Its state is copied, so that a register
has the same number of neighbouring lines, and copied back at the end. The sums along a line are
then sums of registers: one for each lane of ``kernel``, added in the order in which it adds lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from chairlift.engine.cpu.compiled.llvm.jobs import shared
from chairlift.engine.cpu.compiled.llvm.lanes import spread
from chairlift.engine.cpu.compiled.llvm.recurrence.tokens import (
    ARGUMENTS,
    head_of_part,
    prepared,
)


class Form(NamedTuple):
    """The form of a function.

    Attributes:
        name: ``decayed`` or ``delta``.
        lanes: numbers of a register.
        registers: of a block's lines.
    """

    name: str
    lanes: int
    registers: int

    @property
    def is_delta(self) -> bool:
        """Whether products with the key correct what is added."""
        return self.name == "delta"

    @property
    def function(self) -> str:
        """The name of the function that computes a part."""
        return f"{self.job}_part"

    @property
    def job(self) -> str:
        """The name of the function of jobs."""
        return f"{self.name}_block_{self.registers}"

    @property
    def vector(self) -> str:
        """The type of a register."""
        return f"<{self.lanes} x float>"

    @property
    def width(self) -> int:
        """The lines of a block."""
        return self.lanes * self.registers


def block_function(form: Form) -> str:
    """The function ``Form.function``, and the one of jobs, ``Form.job``."""
    lanes, width, counts = form.lanes, form.width, f"<{form.lanes} x i64>"
    lane_numbers = ", ".join(f"i64 {lane}" for lane in range(lanes))
    passed = f"call void @{form.function}({ARGUMENTS}, i64 %part)\nbr label %part_end"
    return f"""
define internal void @{form.function}({ARGUMENTS}, i64 %part) {{
entry:
  %blocks = udiv i64 %lines, {width}
  %block = urem i64 %part, %blocks
  %head_part = udiv i64 %part, %blocks
  {head_of_part("%head_part")}
  %first_line = mul i64 %block, {width}
  %head_line = mul i64 %head_part, %lines
  %own_line = add i64 %head_line, %first_line
  %state_o = mul i64 %own_line, %numbers
  %sh = getelementptr float, ptr %state, i64 %state_o
  %size = mul i64 %numbers, {width}
  %s = alloca float, i64 %size, align 64
  %sums = alloca float, i64 {lanes * width}, align 64
  %recalls = alloca float, i64 {lanes * width}, align 64
  {spread("%n_all", "%numbers", lanes, "i64")}
  %across = mul {counts} %n_all, <{lane_numbers}>
  br label %copy
copy:
  %c = phi i64 [0, %entry], [%c_next, %copy]
  {_lines(_copied_in(form, r) for r in range(form.registers))}
  %c_next = add i64 %c, 1
  %c_more = icmp ult i64 %c_next, %numbers
  br i1 %c_more, label %copy, label %ready
ready:
  br label %token
{prepared(form.name, lanes)}
  {spread("%own_all", "%own_product", lanes)}
  {spread("%rate_all", "%rate", lanes) if form.is_delta else ""}
  br label %lane
{_sums(form)}
added:
  {_lines(_added(form, r) for r in range(form.registers))}
  br label %change
{_change(form)}
token_end:
  %t_next = add i64 %t, 1
  %t_more = icmp ult i64 %t_next, %tokens
  br i1 %t_more, label %token, label %back
back:
  %e = phi i64 [0, %token_end], [%e_next, %back]
  {_lines(_copied_back(form, r) for r in range(form.registers))}
  %e_next = add i64 %e, 1
  %e_more = icmp ult i64 %e_next, %numbers
  br i1 %e_more, label %back, label %end
end:
  ret void
}}
{shared(form.job, ARGUMENTS, passed)}
"""


def declared(lanes: int) -> str:
    """What ``block_function`` calls."""
    vector, places, flags = f"<{lanes} x float>", f"<{lanes} x ptr>", f"<{lanes} x i1>"
    return f"""
declare {vector} @llvm.masked.gather.{_kind(lanes)}({places}, i32, {flags}, {vector})
declare void @llvm.masked.scatter.{_kind(lanes)}({vector}, {places}, i32, {flags})
"""


def _kind(lanes: int) -> str:
    return f"v{lanes}f32.v{lanes}p0"


def _lines(parts: Iterable[str]) -> str:
    return "\n  ".join(parts)


def _places(name: str, number: str, form: Form, r: int) -> str:
    """``%NAME.places``: where the state has a number of the lines of register ``r``."""
    return f"""
  %{name}.line = mul i64 %numbers, {r * form.lanes}
  %{name}.o = add i64 %{name}.line, {number}
  %{name}.at = getelementptr float, ptr %sh, i64 %{name}.o
  %{name}.places = getelementptr float, ptr %{name}.at, <{form.lanes} x i64> %across
  %{name}.own = mul i64 {number}, {form.width}
  %{name}.here = add i64 %{name}.own, {r * form.lanes}
  %{name}.copy = getelementptr float, ptr %s, i64 %{name}.here"""


def _all(form: Form) -> str:
    return f"<{form.lanes} x i1> <" + ", ".join(["i1 true"] * form.lanes) + ">"


def _copied_in(form: Form, r: int) -> str:
    vector, name = form.vector, f"in{r}"
    arguments = f"<{form.lanes} x ptr> %{name}.places, i32 4, {_all(form)}, {vector} poison"
    return f"""{_places(name, "%c", form, r)}
  %{name} = call {vector} @llvm.masked.gather.{_kind(form.lanes)}({arguments})
  store {vector} %{name}, ptr %{name}.copy, align 64"""


def _copied_back(form: Form, r: int) -> str:
    vector, name = form.vector, f"out{r}"
    arguments = f"{vector} %{name}, <{form.lanes} x ptr> %{name}.places, i32 4, {_all(form)}"
    return f"""{_places(name, "%e", form, r)}
  %{name} = load {vector}, ptr %{name}.copy, align 64
  call void @llvm.masked.scatter.{_kind(form.lanes)}({arguments})"""


def _sums(form: Form) -> str:
    """For each lane of ``llvm.recurrence.kernel``, the sums of the products of its numbers."""
    vector, lanes, kinds = form.vector, form.lanes, ("b", "a") if form.is_delta else ("b",)
    fma = f"call {vector} @llvm.fma.v{lanes}f32"
    states = [f"{kind}{r}" for kind in kinds for r in range(form.registers)]
    factors = {"b": "gq", "a": "gk"}
    phis = [
        f"%{name} = phi {vector} [zeroinitializer, %lane], [%{name}.next, %dots]" for name in states
    ]
    broadcasts = [
        f"%{factors[kind]}.at = getelementptr float, ptr %{factors[kind]}, i64 %j\n"
        f"  %{factors[kind]}.j = load float, ptr %{factors[kind]}.at, align 4\n"
        f"  {spread(f'%{factors[kind]}.all', f'%{factors[kind]}.j', lanes)}"
        for kind in kinds
    ]
    products = []
    for r in range(form.registers):
        products.append(
            f"%s{r}.at = getelementptr float, ptr %s.at, i64 {r * lanes}\n"
            f"  %s{r} = load {vector}, ptr %s{r}.at, align 64"
        )
        products += [
            f"%{kind}{r}.next = {fma}({vector} %s{r}, {vector} %{factors[kind]}.all, "
            f"{vector} %{kind}{r})"
            for kind in kinds
        ]
    stores = [
        f"%{kind}{r}.to = getelementptr float, ptr %{kind}.to, i64 {r * lanes}\n"
        f"  store {vector} %{kind}{r}.next, ptr %{kind}{r}.to, align 64"
        for kind in kinds
        for r in range(form.registers)
    ]
    return f"""
lane:
  %l = phi i64 [0, %begin], [%l_next, %stored]
  br label %dots
dots:
  %j = phi i64 [%l, %lane], [%j_next, %dots]
  {_lines(phis)}
  {_lines(broadcasts)}
  %s.o = mul i64 %j, {form.width}
  %s.at = getelementptr float, ptr %s, i64 %s.o
  {_lines(products)}
  %j_next = add i64 %j, {lanes}
  %j_more = icmp ult i64 %j_next, %numbers
  br i1 %j_more, label %dots, label %stored
stored:
  %to.o = mul i64 %l, {form.width}
  %b.to = getelementptr float, ptr %sums, i64 %to.o
  %a.to = getelementptr float, ptr %recalls, i64 %to.o
  {_lines(stores)}
  %l_next = add i64 %l, 1
  %l_more = icmp ult i64 %l_next, {lanes}
  br i1 %l_more, label %lane, label %added
"""


def _tree(form: Form, name: str, array: str, r: int) -> tuple[str, str]:
    """Lines that add the sums of all lanes as ``total`` adds lanes, and the name of the result."""
    vector = form.vector
    lines, names = [], []
    for lane in range(form.lanes):
        own = f"%{name}{r}.{lane}"
        place = lane * form.width + r * form.lanes
        lines += [
            f"{own}.at = getelementptr float, ptr {array}, i64 {place}",
            f"{own} = load {vector}, ptr {own}.at, align 64",
        ]
        names.append(own)
    while len(names) > 1:
        half = len(names) // 2
        for lane in range(half):
            own = f"{names[lane]}.{half}"
            lines.append(f"{own} = fadd {vector} {names[lane]}, {names[lane + half]}")
            names[lane] = own
        names = names[:half]
    return "\n  ".join(lines), names[0]


def _added(form: Form, r: int) -> str:
    """``%dR``: what a token adds, times its key; stores the token's outputs."""
    vector = form.vector
    sums, earlier = _tree(form, "sum", "%sums", r)
    recalled = ""
    added = f"%d{r} = bitcast {vector} %v{r} to {vector}"
    if form.is_delta:
        recalled, known = _tree(form, "recall", "%recalls", r)
        added = f"%wrong{r} = fsub {vector} %v{r}, {known}\n  "
        added += f"%d{r} = fmul {vector} %wrong{r}, %rate_all"
    return f"""
  {sums}
  {recalled}
  %line{r} = add i64 %first_line, {r * form.lanes}
  %v{r}.at = getelementptr float, ptr %vh, i64 %line{r}
  %v{r} = load {vector}, ptr %v{r}.at, align 4
  {added}
  %now{r} = fmul {vector} %d{r}, %own_all
  %out{r}.y = fadd {vector} {earlier}, %now{r}
  %y{r}.at = getelementptr float, ptr %yh, i64 %line{r}
  store {vector} %out{r}.y, ptr %y{r}.at, align 4"""


def _change(form: Form) -> str:
    """Changes the state."""
    vector, lanes = form.vector, form.lanes
    fma = f"call {vector} @llvm.fma.v{lanes}f32"
    changed = [
        f"""
  %m{r}.at = getelementptr float, ptr %m.at, i64 {r * lanes}
  %m{r} = load {vector}, ptr %m{r}.at, align 64
  %kept{r} = fmul {vector} %m{r}, %g.all
  %changed{r} = {fma}({vector} %d{r}, {vector} %k.all, {vector} %kept{r})
  store {vector} %changed{r}, ptr %m{r}.at, align 64"""
        for r in range(form.registers)
    ]
    return f"""
change:
  %m = phi i64 [0, %added], [%m_next, %change]
  %km_at = getelementptr float, ptr %kh, i64 %m
  %km = load float, ptr %km_at, align 4
  {spread("%k.all", "%km", lanes)}
  %gm_at = getelementptr float, ptr %gs, i64 %m
  %gm = load float, ptr %gm_at, align 4
  {spread("%g.all", "%gm", lanes)}
  %m.o = mul i64 %m, {form.width}
  %m.at = getelementptr float, ptr %s, i64 %m.o
  {_lines(changed)}
  %m_next = add i64 %m, 1
  %m_more = icmp ult i64 %m_next, %numbers
  br i1 %m_more, label %change, label %token_end
"""
