"""JSON that stays one line for every reader."""

from __future__ import annotations

# Python's ``str.splitlines``, and with it several HTTP clients, take these for ends of a line:
# U+0085, U+2028 and U+2029. JSON may have them in strings as they are; the others it escapes.
_ESCAPES = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def one_line(encoded: bytes) -> bytes:
    """The same JSON, whose text ``str.splitlines`` does not split."""
    if not encoded.isascii():
        for character, escape in _ESCAPES:
            encoded = encoded.replace(character, escape)
    return encoded
