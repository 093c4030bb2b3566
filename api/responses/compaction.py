"""A conversation's summary, as the opaque text of a compaction item.

Its clients keep the item and send it back in place of the conversation. The text is not encrypted:
whoever has it has had the conversation.
"""

from __future__ import annotations

import base64
import binascii

# Tells our own from another server's, and leaves room for another form.
_PREFIX = "chairlift-1:"


def sealed(summary: str) -> str:
    """The opaque text that holds ``summary``."""
    return _PREFIX + base64.b64encode(summary.encode()).decode()


def opened(text: str) -> str:
    """The summary in an opaque text.

    Raises:
        ValueError: this server has not made it.
    """
    try:
        if not text.startswith(_PREFIX):
            raise ValueError
        return base64.b64decode(text.removeprefix(_PREFIX), validate=True).decode()
    except (ValueError, binascii.Error):
        raise ValueError("is not a compaction that this server has made") from None


def summary_in(text: object) -> object:
    """The same text; raises ValueError as ``opened`` does."""
    if isinstance(text, str):
        opened(text)
    return text
