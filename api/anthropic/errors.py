"""Anthropic's form of an error, for everything below its path."""

from __future__ import annotations

from aiohttp import web

from chairlift.api.anthropic.replies import AnthropicError, AnthropicErrorDetail
from chairlift.api.errors import Problem

PATH = "/v1/messages"
# Anthropic's clients show a request's id from here.
ID_HEADER = "request-id"
# As Anthropic's own names of them have it; what is not here is the client's mistake, or ours.
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


def is_anthropic(request: web.Request) -> bool:
    """Whether a request is for this door, be there such a route or not."""
    return request.path == PATH or request.path.startswith(PATH + "/")


def error_of(problem: Problem, request_id: str) -> AnthropicError:
    """A problem as these routes' clients are told of it."""
    kind = _TYPES.get(problem.status)
    if kind is None:
        kind = "invalid_request_error" if problem.status < 500 else "api_error"
    return AnthropicError(AnthropicErrorDetail(kind, _message(problem)), request_id)


def _message(problem: Problem) -> str:
    """In Anthropic's words where its clients look for them: to ask for a key, and to compact."""
    if problem.status == 401:
        return f"invalid x-api-key: {problem.message}"
    if problem.overflow is None:
        return problem.message
    tokens, context = problem.overflow
    # A prompt that fills the context to the last token leaves no room for a reply.
    return f"prompt is too long: {tokens} tokens > {min(context, tokens - 1)} maximum"
