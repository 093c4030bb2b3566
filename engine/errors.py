"""Every exception Chairlift raises on purpose.

ChairliftError
├── ModelError          the model cannot be loaded: missing, broken, truncated
│   └── UnsupportedModel    it is whole, but Chairlift cannot serve it
├── RequestError        this request can never be served; the client must change it
│   └── ContextOverflow     it does not fit the context or the KV memory
│       └── PromptTooLong       its prompt alone does not
├── GrammarError        what an output has to be cannot be had: invalid, unsupported, too much
├── RowFailed           one row of a step has no token; the others have theirs
├── QueueFull           the server is at its limits now; try again later
└── EngineDead          the engine process has ended; nothing can be served
"""

from __future__ import annotations

from typing import NamedTuple


class ChairliftError(Exception):
    """Base of all of them; its text is one line fit for an operator or a client."""


class ModelError(ChairliftError):
    """The model cannot be loaded: missing, broken, truncated."""


class UnsupportedModel(ModelError):
    """The model is whole, but its architecture, cache kind or format is not supported."""


class RequestError(ChairliftError):
    """The request can never be served as it stands.

    ``param`` is the request field at fault, in the API's terms, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overflow(NamedTuple):
    """The tokens of a prompt, at least, and the most that there is room for."""

    tokens: int
    maximum: int


class ContextOverflow(RequestError):
    """The request does not fit the context or the KV memory; ``overflow`` is of its prompt."""

    def __init__(self, message: str, overflow: Overflow, param: str | None = None) -> None:
        super().__init__(message, param)
        self.overflow = overflow


class PromptTooLong(ContextOverflow):
    """The prompt leaves no room for a single output token."""


class GrammarError(ChairliftError):
    """What an output has to be is not valid, is not supported, or costs too much."""


class RowFailed(ChairliftError):
    """One row of a step has no token, or its prompt no numbers; the other rows have theirs.

    ``reason`` is one of the metric ``chairlift_rows_failed``.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class QueueFull(ChairliftError):
    """The server has as many unfinished requests as it allows.

    ``retry_after`` is the predicted wait in seconds.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(ChairliftError):
    """The engine process has ended, or could not start."""
