"""CUDA kernels for attention over a paged KV cache.

``token_attention`` computes single query tokens, ``chunk_attention`` chunks of prompts, and ``put``
writes keys and values to pages; ``arrays`` has what they take, and ``selftest.kernels_work`` tries
them on this device. Importing it needs no GPU. The sources run on the CPU, too: see
``tests/engine/cuda/emulator``. Must not import the engine's core or client, the scheduler or the
API.
"""
