"""The reply bodies of /v1/files and /v1/batches."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
UNFINISHED: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class FileObject(Struct):
    """A stored file. Times are in Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    object: Literal["file"] = "file"


class FileList(Struct):
    """A page of files; the ids are null on an empty page."""

    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(Struct):
    """Why a batch cannot run; ``line`` counts the lines of the input file from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    """The requests of a batch: all of them, those that succeeded, and those that failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchInputDetails(Struct):
    cached_tokens: int = 0


class BatchOutputDetails(Struct):
    reasoning_tokens: int = 0


class BatchUsage(Struct):
    """The tokens of all requests that succeeded."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: BatchInputDetails = field(default_factory=BatchInputDetails)
    output_tokens_details: BatchOutputDetails = field(default_factory=BatchOutputDetails)


class Batch(Struct, kw_only=True):
    """A batch. Times are in Unix seconds, and null until they are reached."""

    id: str
    endpoint: str
    model: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str]
    status: BatchStatus = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: BatchUsage | None = None
    object: Literal["batch"] = "batch"


class BatchList(Struct):
    """A page of batches; the ids are null on an empty page."""

    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
