"""Errors in Anthropic's format."""

from __future__ import annotations

from msgspec import UNSET

from chairlift.api.anthropic.replies import AnthropicError, AnthropicErrorDetail, ThreadRefusal
from chairlift.api.errors import ErrorFormat, Problem

# Anthropic's error types by status. Any other status is an invalid request or a server error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_of(problem: Problem, request_id: str) -> AnthropicError:
    """The reply body for a problem."""
    kind = _TYPES.get(problem.status)
    if kind is None:
        kind = "invalid_request_error" if problem.status < 500 else "api_error"
    details = ThreadRefusal() if problem.param == "thread" else UNSET
    return AnthropicError(AnthropicErrorDetail(kind, _message(problem), details), request_id)


def _message(problem: Problem) -> str:
    """The message, in Anthropic's words where its clients look for them: they then ask for a key or
    compact the conversation.
    """
    if problem.status == 401:
        return f"invalid x-api-key: {problem.message}"
    if problem.overflow is None:
        return problem.message
    tokens, context = problem.overflow
    # A prompt that fills the whole context is too long too: it leaves no room for a reply.
    return f"prompt is too long: {tokens} tokens > {min(context, tokens - 1)} maximum"


# Anthropic's clients show a request's id from this header.
ANTHROPIC_ERRORS = ErrorFormat(AnthropicError, error_of, id_header="request-id")
