"""The code that LLVM compiles for this CPU, kept in the cache folder.

Compiling takes 0.2 s of CPU time, which is a tenth of the start of a server with a small model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from chairlift.engine.config import cache_dir
from chairlift.engine.device.cache_files import write_whole

_DIGEST_BYTES = 32


def cached(compile_source: Callable[[str], bytes], source: str, target: str) -> bytes:
    """The object file of ``source``; compiled only if the folder has no whole one.

    Args:
        target: the compiler and the CPU: whatever the result depends on besides the source.
    """
    file = _file(source, target)
    with suppress(OSError):
        kept = file.read_bytes()
        if sha256(kept[_DIGEST_BYTES:]).digest() == kept[:_DIGEST_BYTES]:
            return kept[_DIGEST_BYTES:]
    code = compile_source(source)
    with suppress(OSError):
        write_whole(file, sha256(code).digest() + code)
    return code


def _file(source: str, target: str) -> Path:
    return cache_dir() / "compiled" / sha256(f"{target}\n{source}".encode()).hexdigest()[:32]
