"""Images that are sent with a question, as data URLs: the server needs no access to their files."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.api.cli.chat.client import ChatError

MAX_BYTES = 20 << 20
_SIGNATURES = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}

# The content of a user's message: a text, or parts if there are images.
Content = str | list[dict[str, Any]]


class Image(NamedTuple):
    """An image: what it is called, and its data URL."""

    name: str
    url: str


def image_of(data: bytes, name: str) -> Image:
    """The image in the content of a file.

    Raises:
        ChatError: it is too large, or no image that models take.
    """
    if len(data) > MAX_BYTES:
        raise ChatError(f"{name} has more than {MAX_BYTES >> 20} MiB")
    for media_type, signature in _SIGNATURES.items():
        if signature.match(data):
            return Image(name, f"data:{media_type};base64,{base64.b64encode(data).decode()}")
    raise ChatError(f"{name} is no image in PNG, JPEG, WebP or GIF")


def read_image(text: str) -> Image:
    """Reads an image from the path ``text``, which may be quoted as in a shell.

    Raises:
        ChatError: there is no such file, or as ``image_of``.
    """
    path = Path(text).expanduser()
    try:
        if not path.exists():
            path = _unquoted(text)
        if path.exists() and not path.is_file():
            raise ChatError(f"{path} is no file")
        with path.open("rb") as file:
            return image_of(file.read(MAX_BYTES + 1), path.name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ChatError(f"cannot read {path}: {reason}") from error


def _unquoted(text: str) -> Path:
    """Terminals quote the path of a file that is dropped on them."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    return Path(words[0] if len(words) == 1 else text).expanduser()


def content_of(question: str, images: Iterable[Image]) -> Content:
    """The content of a message with a question about images."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image.url}} for image in images
    ]
    return [*parts, {"type": "text", "text": question}] if parts else question


def is_content(value: object) -> bool:
    """Whether ``value`` is the content of a message, as ``content_of`` makes it."""
    if not isinstance(value, list):
        return isinstance(value, str)
    return bool(value) and all(isinstance(part, dict) and _is_part(part) for part in value)


def _is_part(part: dict[str, Any]) -> bool:
    match part:
        case {"type": "text", "text": str()} | {"type": "image_url", "image_url": {"url": str()}}:
            return len(part) == 2
    return False
