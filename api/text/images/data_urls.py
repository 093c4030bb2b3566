"""Data URLs: files inside a URL (RFC 2397)."""

from __future__ import annotations

import base64
import binascii
import string
from typing import NamedTuple

_SPACE = string.whitespace.encode()


class DataURL(NamedTuple):
    """The content of a data URL, and its type; None if it has none."""

    data: bytes
    media_type: str | None


def data_url(url: str) -> DataURL:
    """Decodes a data URL in base64.

    Raises:
        ValueError: it has another encoding, or is damaged. The text does not contain the URL.
    """
    head, comma, body = url.partition(",")
    media_type, *parameters = head.partition(":")[2].split(";")
    if not comma or "base64" not in [parameter.strip().lower() for parameter in parameters]:
        raise ValueError("a data URL must be data:TYPE;base64,DATA")
    try:
        # White space is not data: clients break long lines.
        data = base64.b64decode(body.encode("ascii").translate(None, _SPACE), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the base64 of a data URL is damaged: {error}") from None
    return DataURL(data, media_type.strip() or None)
