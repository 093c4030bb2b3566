"""What the allocator does with memory that a test has freed."""

from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The largest threshold that glibc accepts.
_MAPPED_BYTES = 32 << 20
_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Keeps freed memory in this process, up to 256 MB; with glibc only.

    glibc gives large blocks back to the kernel, which clears each page when it is used again:
    up to a quarter of the CPU time of tests that allocate and free arrays in each step.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
