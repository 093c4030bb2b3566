"""Kernels that LLVM compiles for the CPU at hand (the package ``llvmlite``).

``llvm_kernel`` compiles them; the other ``llvm_`` modules write parts of them in LLVM's language.
``compiled_matmul`` and ``row_attention`` call them.
"""
