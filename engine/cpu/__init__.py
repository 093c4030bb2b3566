"""Faster computation on the CPU: the BLAS, its threads, and kernels in NumPy and LLVM.

``blas.load_fast_blas`` has to run before MLX is imported, so ``blas``, ``cores`` and
``thread_count`` import no MLX. ``kernels.install`` and ``decoder.install`` replace parts of a
loaded model. Runs in the engine process. Imports neither the engine's core nor its client, the
scheduler or the API.
"""
