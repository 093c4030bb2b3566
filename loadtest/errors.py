"""The exceptions of the load test.

LoadTestError
├── UsageError          the flags or the data set are invalid; no request was sent
└── ServerError         the server cannot be reached, or lacks something that the test needs
"""

from __future__ import annotations


class LoadTestError(Exception):
    """The base of all exceptions here. The message is one line for the operator."""


class UsageError(LoadTestError):
    """The flags or the data set are invalid; no request was sent."""


class ServerError(LoadTestError):
    """The server cannot be reached, or lacks something that the test needs."""
