"""Encodes a conversation's summary as the opaque text of a compaction item.

The client sends the item back in place of the conversation. The text is encoded but not encrypted,
because the client has seen the conversation anyway.
"""

from __future__ import annotations

import base64
import binascii

# Distinguishes our items from those of other servers, and this format from later ones.
_PREFIX = "chairlift-1:"


def sealed(summary: str) -> str:
    """Encodes ``summary`` as opaque text."""
    return _PREFIX + base64.b64encode(summary.encode()).decode()


def opened(text: str) -> str:
    """Decodes the summary from an opaque text.

    Raises:
        ValueError: the text does not have this server's format.
    """
    try:
        if not text.startswith(_PREFIX):
            raise ValueError
        return base64.b64decode(text.removeprefix(_PREFIX), validate=True).decode()
    except (ValueError, binascii.Error):
        raise ValueError("is not a compaction that this server has made") from None


def summary_in(text: object) -> object:
    """Returns ``text`` unchanged; raises ValueError if ``opened`` cannot decode it."""
    if isinstance(text, str):
        opened(text)
    return text
