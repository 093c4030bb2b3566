"""Standard input, output and error that the server was started without."""

from __future__ import annotations

import os
from contextlib import suppress


def fill() -> None:
    """Opens /dev/null in the place of those that are closed. Else the next files and sockets would
    get their numbers, and a client what is written to standard error.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                # The lowest number that is free is this one.
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
