"""Kernels that LLVM compiles for the CPU at hand (the package ``llvmlite``).

``jobs`` calls them, one at a time or as a program, and ``worker_threads`` shares their parts; the
modules of ``llvm`` write them in LLVM's language. ``compiled_matmul``, ``amx_matmul``,
``quantized_matmul``, ``row_attention`` and ``compiled_elementwise`` make their jobs.
"""
