"""CUDA kernels: attention over pages, transformer blocks in few launches, experts, adapters.

``paged.selftest.kernels_work`` tries the attention kernels on this device, ``paged.kernels`` offers
them to the caches, and ``block.install`` uses others in a model. Runs in the engine process;
importing it needs no GPU. Imports neither the engine's core nor its client, the scheduler or the
API.
"""
