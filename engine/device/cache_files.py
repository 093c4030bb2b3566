"""Files in the cache folder. Several processes may write the same one, and any may be killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """Writes a file that no process ever sees in part.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as output:
            output.write(content)
        os.replace(partial, file)
    except OSError:
        os.unlink(partial)
        raise
