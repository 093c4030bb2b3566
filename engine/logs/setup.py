"""Logging of both processes: text or JSON lines, with the id of the request that they are about.

python-json-logger makes the JSON, because it is a formatter for the standard library's ``logging``,
which MLX-LM, transformers and aiohttp use as well.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, Protocol

from pythonjsonlogger.core import RESERVED_ATTRS, merge_record_extra
from pythonjsonlogger.json import JsonFormatter

from chairlift.engine.logs.writer import LogWriter

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
# "api", "engine", or "engine-1" and so on for an engine's further ranks.
Process = str
STDERR = 2
# The field of a record that holds its lines in the text format; its other fields are for JSON.
BANNER = "banner"


class Stream(Protocol):
    """The destination of log lines."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


# The id of the current request, which is added to every line logged for it.
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


def set_up_logs(level: str, log_format: LogFormat, process: Process) -> None:
    """Logs records of ``level`` and above to standard error, one line per record."""
    writer = LogWriter(STDERR)
    logging.basicConfig(level=level.upper(), handlers=[log_handler(log_format, process, writer)])
    if log_format == "json":
        sys.excepthook = _log_uncaught


def log_handler(log_format: LogFormat, process: Process, stream: Stream) -> logging.Handler:
    """A handler that writes records to ``stream``, with the id of their request."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(_add_request_id)
    handler.setFormatter(_json(process) if log_format == "json" else TextFormatter(process))
    return handler


def _json(process: Process) -> JsonFormatter:
    return JsonFormatter(
        "%(levelname)s %(name)s %(message)s",
        reserved_attrs=[*RESERVED_ATTRS, BANNER],
        rename_fields={"levelname": "level", "name": "logger", "exc_info": "exception"},
        static_fields={"process": process},
        timestamp="time",
        json_ensure_ascii=False,
    )


class TextFormatter(logging.Formatter):
    """``time LEVEL process logger: message key=value …``.

    Critical messages have no such prefix. A record with the attribute BANNER is those lines alone.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line without a traceback."""
        if record.levelno >= logging.CRITICAL:
            return f"chairlift: error: {record.message}"
        if lines := getattr(record, BANNER, None):
            return "\n".join(lines)
        fields = merge_record_extra(record, {}, reserved=RESERVED_ATTRS)
        pairs = [f" {key}={_plain(value)}" for key, value in fields.items() if value is not None]
        return super().formatMessage(record) + "".join(pairs)


def _plain(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _add_request_id(record: logging.LogRecord) -> bool:
    request_id = REQUEST_ID.get()
    if request_id is not None and not hasattr(record, "request_id"):
        record.request_id = request_id
    return True


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger(__name__).error("uncaught: %s", error, exc_info=(kind, error, trace))
