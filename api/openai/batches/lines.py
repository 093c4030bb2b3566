"""The lines of a batch's input file, and those of its output and error files."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from chairlift.api.http.json_lines import one_line
from chairlift.api.openai.batches.replies import BatchError
from chairlift.api.schemas.decoding import refused_value, without_mark

MAX_CUSTOM_ID = 512
# Of a file in which every line is wrong, a batch reports the first ones.
MAX_ERRORS = 100


class RequestLine(NamedTuple):
    """One request of a batch.

    Attributes:
        number: its line in the input file, from 1.
        custom_id: the client's id of the request.
        body: the request's JSON.
        choices: the choices that it generates at the same time.
    """

    number: int
    custom_id: str
    body: bytes
    choices: int


class LineError(Exception):
    """A line of an input file is wrong; ``error`` says how."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class LineRules:
    """Rules that each line of one batch must meet.

    Attributes:
        endpoint: the ``url`` of all lines.
        models: the names that a body's ``model`` may have; None: any, it was checked before.
        max_line_bytes: the maximum size of a line.
        max_lines: the maximum number of requests.
    """

    endpoint: str
    models: Sequence[str] | None
    max_line_bytes: int
    max_lines: int


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    """The fields of a body that a batch looks at; the endpoint validates all of it."""

    model: Any = None
    stream: Any = None
    background: Any = None
    priority: Any = None
    n: Any = None
    prompt: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def numbered_lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1.

    A line that is too long is cut behind ``max_line_bytes``.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_line_bytes + 1):
            number += 1
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(max_line_bytes + 1)
            if without_mark(line).strip():
                yield number, line


def parse_line(number: int, text: bytes, rules: LineRules) -> RequestLine:
    """Parses one line.

    Raises:
        LineError: it is no request that this batch may contain.
    """
    if len(text) > rules.max_line_bytes:
        raise LineError("line_too_long", f"A line may have {rules.max_line_bytes} bytes.")
    text = without_mark(text)
    try:
        line = _decode_line(text)
        body = _decode_body(line.body) if bytes(line.body)[:1] == b"{" else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if refused := refused_value(text, error):
            raise LineError("invalid_json_line", f"This line is invalid: {refused}.") from None
        raise LineError("invalid_json_line", "This line is not a JSON object.") from None
    custom_id = line.custom_id
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        raise LineError(
            "invalid_custom_id",
            f"Each line needs a custom_id, a string of 1 to {MAX_CUSTOM_ID} characters.",
            "custom_id",
        )
    if line.method != "POST":
        raise LineError("invalid_method", "The method must be POST.", "method")
    if line.url != rules.endpoint:
        message = f"The URL of each request must be the batch's endpoint, {rules.endpoint}."
        raise LineError("invalid_url", message, "url")
    if body is None:
        raise LineError("invalid_body", "The body must be a JSON object.", "body")
    _check_body(body, rules)
    return RequestLine(number, custom_id, bytes(line.body), _choices_of(body))


def _check_body(body: _Body, rules: LineRules) -> None:
    known = rules.models
    if body.model is not None and known is not None and body.model not in known:
        served = " or ".join(map(repr, known))
        message = f"The model {str(body.model)[:200]!r} does not exist; this is {served}."
        raise LineError("model_not_found", message, "body.model")
    for name in ("stream", "background"):
        if getattr(body, name) not in (None, False):
            raise LineError(
                "unsupported_parameter", f"{name} is not supported in a batch.", f"body.{name}"
            )
    if body.priority is not None:
        message = "priority is not supported in a batch, whose requests have the lowest."
        raise LineError("unsupported_parameter", message, "body.priority")


def _choices_of(body: _Body) -> int:
    """The number of choices that a request may generate at once; the endpoint bounds it."""
    n = int(body.n) if type(body.n) in (int, float) and body.n > 0 else 1
    prompts = body.prompt
    is_several = isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)
    return n * (len(prompts) if is_several else 1)


class Validation(NamedTuple):
    """The number of a file's requests, and what is wrong with the first wrong ones."""

    total: int
    errors: list[BatchError]


def validate(path: Path, rules: LineRules) -> Validation:
    """Validates all lines of an input file.

    Raises:
        OSError: the file cannot be read.
    """
    errors: list[BatchError] = []
    seen: set[str] = set()
    total = 0
    for number, text in numbered_lines(path, rules.max_line_bytes):
        total += 1
        if total > rules.max_lines:
            message = f"A batch may have {rules.max_lines} requests."
            return Validation(total, [BatchError("too_many_requests", message, line=number)])
        try:
            line = parse_line(number, text, rules)
            if line.custom_id in seen:
                message = f"The custom_id {line.custom_id[:64]!r} is that of another line."
                raise LineError("duplicate_custom_id", message, "custom_id")
            seen.add(line.custom_id)
        except LineError as error:
            errors.append(BatchError(error.code, str(error), error.param, number))
            if len(errors) == MAX_ERRORS:
                break
    if not total:
        errors.append(BatchError("empty_file", "The input file has no requests."))
    return Validation(total, errors)


class LineResponse(msgspec.Struct):
    """The reply to a request. ``body`` is the reply's JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineProblem(msgspec.Struct):
    """Why a request was not run."""

    code: str
    message: str


class ResultLine(msgspec.Struct):
    """A line of an output or error file; exactly one of ``response`` and ``error`` is not null."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineProblem | None


EXPIRED = LineProblem(
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)
CANCELLED = LineProblem(
    "batch_cancelled", "This request was not executed: its batch was cancelled."
)


def result_line(
    custom_id: str, response: LineResponse | None = None, error: LineProblem | None = None
) -> bytes:
    """One line of an output or error file, with its newline."""
    line_id = f"batch_req_{uuid.uuid4().hex}"
    line = msgspec.json.encode(ResultLine(line_id, custom_id, response, error))
    return one_line(line) + b"\n"
