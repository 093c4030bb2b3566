"""Finds the reason in Ray's messages, which quote whole tracebacks."""

from __future__ import annotations

import re
from collections.abc import Sequence

# The last line of the exception by which a replica says why its server ended, then any other.
_REASONS = (
    re.compile(r"^(?:[\w.]+\.)?(?:ReplicaLost|KeyFileError): (.+)$", re.MULTILINE),
    re.compile(r"^((?:[A-Za-z_][\w.]*(?:Error|Exception)): .+)$", re.MULTILINE),
)


def failure_reason(messages: Sequence[str]) -> str:
    """One line from the messages about an application and its deployments."""
    for pattern in _REASONS:
        for message in messages:
            if found := pattern.findall(message):
                return str(found[-1])
    return one_line(" ".join(messages))


def one_line(text: str) -> str:
    """The text with each run of white space as one blank."""
    return " ".join(text.split())
