"""Makes programs of a layer's products and of the functions between them."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from chairlift.engine.cpu.compiled import compiled_elementwise
from chairlift.engine.cpu.compiled.compiled_experts import CompiledExperts, GroupsJob
from chairlift.engine.cpu.compiled.jobs import NoProgramError, Program
from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.matrix import Matrix
from chairlift.engine.cpu.views import LastingMemory

T = TypeVar("T")


class ProgramBuilder:
    """Adds operations to a program.

    Arrays have names. Programs of a thread share the memory of a name, so a program must read an
    array before it, or any other program, writes another one of the same name.

    Attributes:
        program: the program.
    """

    def __init__(self) -> None:
        self.program = Program()

    def array(self, name: str, *shape: int) -> Floats:
        """An uninitialized array whose memory stays."""
        array: Floats = _memories.memory[name].array(np.float32, *shape)
        return array

    def product(self, name: str, matrix: Matrix, x: Floats) -> Floats:
        """See ``Matrix.multiply``.

        Raises:
            NoProgramError: the matrix has no compiled product.
        """
        memory = _memories.memory
        return _some(matrix.multiply(x, memory[name], memory["work"], self.program.add))

    def experts(
        self, name: str, experts: CompiledExperts, x: Floats, groups: NDArray[np.int64]
    ) -> tuple[Floats, GroupsJob]:
        """See ``CompiledExperts.build``."""
        memory = _memories.memory
        return experts.build(self.program, x, groups, memory[name], memory["work"])

    def gated(self, activation: str, name: str, gates: Floats, others: Floats) -> Floats:
        """``swiglu`` or ``geglu``; see ``compiled_elementwise.gated``.

        Raises:
            NoProgramError: their numbers do not fill registers.
        """
        into = self.array(name, *gates.shape)
        return _some(compiled_elementwise.gated(activation, gates, others, into, self.program.add))

    def norm(self, x: Floats, weight: Floats, eps: Floats, into: Floats) -> Floats:
        """See ``compiled_elementwise.norm``.

        Raises:
            NoProgramError: their numbers do not fill registers.
        """
        return _some(compiled_elementwise.norm(x, weight, eps, into, self.program.add))

    def sum(self, x: Floats, y: Floats, into: Floats) -> Floats:
        """See ``compiled_elementwise.added``.

        Raises:
            NoProgramError: their numbers do not fill registers.
        """
        return _some(compiled_elementwise.added(x, y, into, self.program.add))

    def rotated(self, name: str, x: Floats, cosines: Floats, sines: Floats) -> Floats:
        """See ``compiled_elementwise.rotated``.

        Raises:
            NoProgramError: half of a head does not fill registers.
        """
        into = self.array(name, *x.shape)
        return _some(compiled_elementwise.rotated(x, cosines, sines, into, self.program.add))


class _Memories(threading.local):
    def __init__(self) -> None:
        self.memory: defaultdict[str, LastingMemory] = defaultdict(LastingMemory)


def _some(result: T | None) -> T:
    if result is None:
        raise NoProgramError
    return result


_memories = _Memories()
