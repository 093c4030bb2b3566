"""Reads images from the folder that the server's settings name."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAX_BYTES = 20 << 20


def read_file(url: str, folder: Path) -> bytes:
    """Reads the file of a ``file:`` URL.

    Args:
        folder: it must be below this folder, also where links lead to.

    Raises:
        ValueError: it is not; or it is no regular file, too large, or not there.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise ValueError("a file's URL must be file:///PATH")
    try:
        real = Path(path).resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise ValueError("the file is not below the folder of images")
        # NOTE: a pipe would block its reader without this flag.
        number = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            return _content(number)
        finally:
            os.close(number)
    except OSError:
        # One text for all: it must not tell which files exist elsewhere.
        raise ValueError("the file is not below the folder of images") from None


def _content(number: int) -> bytes:
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise ValueError(f"it is no file of at most {MAX_BYTES} bytes")
    content = b""
    while len(content) < status.st_size and (part := os.read(number, status.st_size)):
        content += part
    return content
