"""LLVM as the compiler of functions for this CPU (the package ``llvmlite``)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from chairlift.engine.device.compiled_code import cached


class Function(NamedTuple):
    """A compiled function of a job; see ``llvm.jobs``.

    Attributes:
        address: of its code.
        call: takes a job's address, and computes parts of it, without the interpreter's lock.
    """

    address: int
    call: Callable[[int], None]


class CompiledModule:
    """The functions of one source.

    Args:
        target: LLVM's target machine, which is freed with this module.
        code: an object file for it.
    """

    def __init__(self, target: Any, code: bytes) -> None:
        import llvmlite.binding as llvm

        # It owns the code's memory.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """The address of a function."""
        address: int = self._engine.get_function_address(name)
        return address

    def function(self, name: str) -> Function:
        """A function of ``llvm.jobs.shared``."""
        address = self.address(name)
        call: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        call.module = self
        return Function(address, call)


class HostCompiler:
    """Compiles LLVM's language for this CPU.

    Attributes:
        features: whether the CPU has each feature, by LLVM's names.
    """

    def __init__(self) -> None:
        import llvmlite
        import llvmlite.binding as llvm

        host = llvm.get_host_cpu_features()
        self.features: Mapping[str, bool] = host
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._cpu = {"cpu": llvm.get_host_cpu_name(), "features": host.flatten(), "opt": 3}
        version = f"{llvmlite.__version__} {llvm.llvm_version_info}"
        self._name = f"{version} {llvm.get_default_triple()} {self._cpu} inlined"

    def compile(self, source: str) -> CompiledModule:
        """The functions of ``source``; the code is kept for later processes."""
        return CompiledModule(self._target(), cached(self._emit, source, self._name))

    def _target(self) -> Any:
        """A target machine for this CPU."""
        import llvmlite.binding as llvm

        return llvm.Target.from_default_triple().create_target_machine(**self._cpu)

    def _emit(self, source: str) -> bytes:
        import llvmlite.binding as llvm

        module, target = llvm.parse_assembly(source), self._target()
        module.verify()
        inline_always(module, target)
        code: bytes = target.emit_object(module)
        return code


def inline_always(module: Any, target: Any) -> None:
    """Replaces calls of the functions that are ``alwaysinline``; code generation does not."""
    import llvmlite.binding as llvm

    passes = llvm.create_new_module_pass_manager()
    passes.add_always_inliner_pass()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options()))


@functools.cache
def host_compiler() -> HostCompiler | None:
    """The compiler; None without ``llvmlite``."""
    try:
        return HostCompiler()
    except ImportError:
        return None
