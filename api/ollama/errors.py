"""Errors in Ollama's format."""

from __future__ import annotations

from chairlift.api.errors import ErrorFormat, Problem
from chairlift.api.ollama.replies import OllamaError


def error_of(problem: Problem, request_id: str) -> OllamaError:
    """The reply body for a problem, which is also the last line of a stream that fails."""
    if problem.code == "model_not_found":
        # Clients look for these words, to offer another model.
        return OllamaError(f"model not found: {problem.message}")
    return OllamaError(problem.message)


OLLAMA_ERRORS = ErrorFormat(OllamaError, error_of)
