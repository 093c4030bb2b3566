"""The kernels compile for CPUs other than this one, without calls into a runtime library."""

from __future__ import annotations

import pytest

from chairlift.engine.cpu.compiled.llvm import dot, kernel
from chairlift.engine.cpu.compiled.llvm.host_compiler import inline_always
from chairlift.engine.cpu.compiled.llvm.recurrence import kernel as recurrence
from chairlift.engine.cpu.compiled.llvm.sampling import choice

llvm = pytest.importorskip("llvmlite.binding")

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
# Functions of compiler-rt and libgcc: conversions that a CPU has no instruction for.
LIBRARY = ("__extendhfsf2", "__truncsfhf2", "__gnu_h2f_ieee", "__gnu_f2h_ieee", "memset")


@pytest.fixture(scope="module", autouse=True)
def _targets() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("triple", "cpu", "registers", "instruction"),
    [
        (X86, "haswell", (8, 6, 4), "vcvtph2ps"),
        (X86, "znver4", (16, 12, 10), "vcvtph2ps"),
        (ARM, "neoverse-n1", (4, 8, 8), "fcvtl"),
        ("aarch64-apple-darwin", "apple-m1", (4, 8, 8), "fcvtl"),
    ],
)
def test_products_and_attention(
    triple: str, cpu: str, registers: tuple[int, int, int], instruction: str
) -> None:
    code = _assembly(kernel._source(kernel.Registers(*registers)), triple, cpu)
    assert instruction in code, "float16 is converted in registers"
    code += _assembly(recurrence.source(registers[0]), triple, cpu)
    code += _assembly(choice.source(), triple, cpu)
    assert not [name for name in LIBRARY if name in code]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "registers"),
    [("alderlake", dot.Registers(8, 2)), ("znver4", dot.Registers(16, 3))],
)
def test_products_of_bytes(cpu: str, registers: dot.Registers) -> None:
    code = _assembly(dot._source(registers), X86, cpu)
    assert "vpdpbusd" in code
    assert not [name for name in LIBRARY if name in code]


def _assembly(source: str, triple: str, cpu: str) -> str:
    module = llvm.parse_assembly(source)
    module.triple = triple
    module.verify()
    target = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    inline_always(module, target)
    code: str = target.emit_assembly(module)
    return code
