"""CUDA kernels: attention of decode rows, transformer blocks in few launches, rows in buffers.

``selftest.kernels_work`` tries the kernels on this device, ``attention.attend`` and
``block.install`` use them in a model, and ``layer`` has the cache layers that they write to. Runs
in the engine process; importing it needs no GPU. Imports neither the engine's core nor its client,
the scheduler or the API.
"""
