"""Writes files with results: checked before a long test, and never half written."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from chairlift.loadtest.errors import UsageError


def check_writable(path: Path, flag: str) -> None:
    """Checks before a long test that a file can be written, and makes its folder.

    Raises:
        UsageError: it cannot be written; the message names ``flag``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise UsageError(f"{flag}: {error}") from error


def output_file(text: str) -> Path:
    """The type of a flag whose file is written after a long test."""
    path = Path(text)
    try:
        check_writable(path, "file")
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def write_file(path: Path, text: str, flag: str) -> None:
    """Writes a file. If that fails, as on a full disk, an older file at the path is kept.

    Characters that UTF-8 lacks, as in names of files in other encodings, become question marks.

    Raises:
        UsageError: it cannot be written; the message names ``flag``.
    """
    data = text.encode(errors="replace")
    part = path.with_name(f".chairlift-{os.getpid()}.part")
    try:
        if path.exists() and not path.is_file():  # a pipe or a terminal
            path.write_bytes(data)
            return
        try:
            part.write_bytes(data)
            part.replace(path.resolve())
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{flag}: {error}") from error
