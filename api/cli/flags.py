"""What the values of flags look like: argparse's types."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", re.IGNORECASE)


def byte_size(text: str) -> int:
    """Bytes from "4G", "512M", "1.5GiB" or "4096": units are powers of 1024."""
    size = byte_size_or_zero(text)
    if size == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4G, 512M or 4096")
    return size


def byte_size_or_zero(text: str) -> int:
    """Bytes as in ``byte_size``, or 0."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4G, 512M or 4096")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def directory(text: str) -> Path:
    """A directory that is there or can be made."""
    path = Path(text).expanduser()
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return path


def positive(text: str) -> int:
    """A whole number above 0."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def port(text: str) -> int:
    """A port, 0 included."""
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def positive_seconds(text: str) -> float:
    """Seconds, less than a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
