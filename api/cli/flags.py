"""Types of flag values, for argparse's ``type``. They raise ArgumentTypeError for wrong values."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from urllib.parse import urlsplit

from chairlift.engine.messages.speculative_config import parse_config

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:I?B)?", re.IGNORECASE)

_COUNT = re.compile(r"(\d{1,16}(?:\.\d{1,9})?)([kKmM]?)", re.ASCII)
# Messages between processes have no larger integers.
_LIMIT = 1 << 63
_FACTORS = {"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20}


def byte_size(text: str) -> int:
    """Parses a size above 0 like "4G", "512M", "1.5GiB" or "4096" to bytes; K is 1024."""
    size = byte_size_or_zero(text)
    if size == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4G, 512M or 4096")
    return size


def byte_size_or_zero(text: str) -> int:
    """Parses a size like ``byte_size``, or 0."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4G, 512M or 4096")
    size = float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")
    if size >= _LIMIT:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is more than any machine has")
    return int(size)


def directory(text: str) -> Path:
    """Parses the path of a directory, which need not exist yet."""
    path = Path(text).expanduser()
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory")
    return path


def existing_file(text: str) -> Path:
    """Parses the path of a file that exists."""
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file")
    return path


def positive(text: str) -> int:
    """Parses an integer from 1 to 2**63 - 1."""
    if not (_is_whole(text) and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0, and below 2**63")
    return int(text)


def token_count(text: str) -> int:
    """Parses an integer above 0, or one like vLLM's "32k" (thousands) and "32K" (of 1024)."""
    match = _COUNT.fullmatch(text)
    number = float(match[1]) * _FACTORS[match[2]] if match else 0.0
    if not 1 <= number < 1 << 53 or number % 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0, like 4096 or 4K")
    return int(number)


def share(text: str) -> float:
    """Parses a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return value


def whole(text: str) -> int:
    """Parses an integer from 0 to 2**63 - 1."""
    if not _is_whole(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number below 2**63")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20 and int(text) < _LIMIT


def port(text: str) -> int:
    """Parses a port from 0 to 65535."""
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def http_url(text: str) -> str:
    """Checks that an address begins with http:// or https://, and names a host."""
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    return text


def positive_seconds(text: str) -> float:
    """Parses a number of seconds above 0 and below a day."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def factor(text: str) -> float:
    """Parses a number from 0 to 1000."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1000")
    return value


def generation_config(text: str) -> str:
    """Parses "auto", "none" (or "vllm", its name there), or the path of a file or its folder."""
    if text in ("none", "vllm"):
        return "none"
    if text != "auto":
        # Imported here, because --help needs none of its imports.
        from chairlift.engine.errors import ModelError
        from chairlift.engine.hub.generation_config import config_file

        try:
            config_file(text)
        except ModelError as error:
            raise argparse.ArgumentTypeError(f"not auto, none or a file: {error}") from error
    return text


def served_name(text: str) -> str:
    """Checks that requests can name a model by a text: it is printable, without outer spaces."""
    if not (text and text.isprintable() and text.strip() == text):
        raise argparse.ArgumentTypeError(f"{text!r:.80} cannot name a model")
    return text


def lora(text: str) -> str:
    """Checks that a text is NAME=PATH."""
    name, _, path = text.partition("=")
    if not (name.strip() and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return f"{name.strip()}={path}"


def json_object(text: str) -> str:
    """Checks that a text is a JSON object."""
    try:
        valid = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a JSON object")
    return text


def speculative_config(text: str) -> str:
    """Checks that a text is a JSON object of speculative decoding's settings."""
    try:
        parse_config(text)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise argparse.ArgumentTypeError(f"{text!r:.80}: {why}") from error
    return text
