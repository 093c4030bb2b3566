"""One row of the table of routes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from chairlift.api.admission.admission import Access
from chairlift.api.errors import OPENAI_ERRORS, ErrorFormat
from chairlift.api.http.requests import Handler
from chairlift.api.http.sse import PLAIN, Framing
from chairlift.api.schemas.request import Request


@dataclass(frozen=True, slots=True)
class Route:
    """One route, as the app serves it and /openapi.json describes it.

    Attributes:
        method: the HTTP method.
        path: the pattern, with path parameters in braces.
        handler: the coroutine that answers.
        summary: one line for /openapi.json.
        reply: the type of the reply body; None means that it is a file.
        request: the type of the request body. A route that has one does work, so its requests
            count against their key's limits.
        chunks: the types of its stream's events, if it can stream.
        framing: the format of its stream.
        error_format: the format of its errors.
        form: the JSON schema of each field of a body that is multipart/form-data.
        query: the JSON schema of each query parameter.
        is_free: whether it needs no API key.
        is_list: whether the reply body is a list of ``reply``.
        anthropic_reply: the type of the reply body for Anthropic's clients, if it is another one;
            they get errors in Anthropic's format, too.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    reply: type[msgspec.Struct] | None
    request: type[Request] | None = None
    chunks: tuple[type[msgspec.Struct], ...] = ()
    error_format: ErrorFormat = OPENAI_ERRORS
    framing: Framing = PLAIN
    form: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    query: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    is_free: bool = False
    is_list: bool = False
    anthropic_reply: type[msgspec.Struct] | None = None

    @property
    def access(self) -> Access:
        """The route's access class, for the admission middleware."""
        if self.is_free:
            return "free"
        return "key" if self.request is None else "work"
