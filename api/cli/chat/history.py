"""The file of the lines that were typed at the prompt."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

# A larger file loses its older half when a conversation begins.
_MAX_BYTES = 1 << 20
# FileHistory begins each entry with a comment line.
_ENTRY = b"\n# "


def open_history(path: Path) -> History:
    """Returns the history in ``path``, a file that only its owner can read.

    If the file cannot be written, the history lasts as long as the process, and stderr says so.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
        _shorten(path)
    except OSError as error:
        print(f"the history is not kept: {error.strerror}: {path}", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(path)


def _shorten(path: Path) -> None:
    content = path.read_bytes()
    if len(content) <= _MAX_BYTES:
        return
    begin = content.find(_ENTRY, len(content) - _MAX_BYTES // 2)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content[begin:] if begin >= 0 else b"")
    new.replace(path)
