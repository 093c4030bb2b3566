"""Replaces standard streams that were closed when the server was started."""

from __future__ import annotations

import os
from contextlib import suppress


def fill() -> None:
    """Opens /dev/null for closed standard streams.

    Otherwise later files and sockets would get their numbers, and a client would receive the text
    that is written to standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                # The system assigns the lowest free number, which is this one.
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
