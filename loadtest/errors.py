"""Every exception the load test raises on purpose.

LoadTestError
├── UsageError          the flags or the data set make no sense; nothing was sent
└── ServerError         the server cannot be reached, or does not do what the test needs
"""

from __future__ import annotations


class LoadTestError(Exception):
    """Base of all of them; its text is one line fit for an operator."""


class UsageError(LoadTestError):
    """The flags or the data set make no sense; nothing was sent."""


class ServerError(LoadTestError):
    """The server cannot be reached, or does not do what the test needs."""
