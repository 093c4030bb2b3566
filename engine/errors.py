"""Every exception that Chairlift raises on purpose.

ChairliftError
├── ModelError          the model cannot be loaded: missing, broken, truncated
│   └── UnsupportedModel    the model is intact, but Chairlift cannot serve it
├── AdapterError        the adapter cannot be loaded: damaged, foreign, too many, unsupported
├── RequestError        this request can never be served; the client must change it
│   └── ContextOverflow     it does not fit the context or the KV memory
│       └── PromptTooLong       prompt and max_tokens do not fit the context
├── GrammarError        the grammar of an output is invalid, unsupported or too expensive
├── RowFailed           one row of a step got no token; the other rows got theirs
├── QueueFull           the server is at its limits now; try again later
└── EngineDead          the engine process has ended; nothing can be served
"""

from __future__ import annotations

from typing import NamedTuple


class ChairliftError(Exception):
    """Base of all these exceptions. The text is one line for an operator or a client."""


class ModelError(ChairliftError):
    """The model cannot be loaded: missing, broken, truncated."""


class UnsupportedModel(ModelError):
    """The model is intact, but its architecture, cache kind or format is not supported."""


class AdapterError(ChairliftError):
    """The LoRA adapter cannot be loaded; the model and its other adapters are not affected."""


class RequestError(ChairliftError):
    """The request can never be served as it stands.

    Attributes:
        param: the API's name of the field at fault, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Overflow(NamedTuple):
    """Sizes of a prompt that does not fit.

    Attributes:
        tokens: tokens of the prompt, or a lower bound of them.
        maximum: tokens that would fit.
    """

    tokens: int
    maximum: int


class ContextOverflow(RequestError):
    """The request does not fit the context or the KV memory.

    Attributes:
        overflow: the size of its prompt, and the size that would fit.
    """

    def __init__(self, message: str, overflow: Overflow, param: str | None = None) -> None:
        super().__init__(message, param)
        self.overflow = overflow


class PromptTooLong(ContextOverflow):
    """The prompt, or it and ``max_tokens``, exceed the context."""


class GrammarError(ChairliftError):
    """The grammar that a request asks for is invalid, is not supported, or costs too much."""


class RowFailed(ChairliftError):
    """One row of a step got no token, or no embedding; the other rows are not affected.

    Attributes:
        reason: the label of the metric ``chairlift_rows_failed``.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class QueueFull(ChairliftError):
    """The server has as many unfinished requests as it allows.

    Attributes:
        retry_after: the predicted wait in seconds.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(ChairliftError):
    """The engine process has ended, or could not start."""
