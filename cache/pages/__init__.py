"""The paged KV cache: sequences hold lists of pages, and share the pages of common prefixes.

Beside the pages, batches have the states of recurrent layers (``states``), and attention that model
files compute by themselves reads copies (``dense``). A step is divided for both (``step_parts``).

It runs in the engine's process, where kernels can read and write pages in place (CUDA); ``cache``'s
rings serve everything else. Kernels are passed in (``kernels.PageKernels``); it imports neither the
engine nor the scheduler.
"""
