"""Errors in Ollama's format."""

from __future__ import annotations

from chairlift.api.errors import ErrorFormat, Problem
from chairlift.api.ollama.replies import OllamaError


def error_of(problem: Problem, request_id: str) -> OllamaError:
    """The reply body for a problem, which is also the last line of a stream that fails."""
    return OllamaError(problem.message)


OLLAMA_ERRORS = ErrorFormat(OllamaError, error_of)
