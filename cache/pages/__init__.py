"""The paged KV cache: sequences hold lists of pages, and share the pages of common prefixes.

It runs in the engine's process, where kernels can read and write pages in place (CUDA); ``cache``'s
rings serve everything else. Kernels are passed in (``kernels.PageKernels``); it imports neither the
engine nor the scheduler.
"""
