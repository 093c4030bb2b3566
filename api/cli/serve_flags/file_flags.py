"""The flags of ``serve`` for files and batches."""

from __future__ import annotations

import argparse
from typing import Any

from chairlift.api.cli.flags import byte_size, byte_size_or_zero, directory, positive
from chairlift.api.settings import ServerSettings

_DEFAULTS = ServerSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Files and batches"."""
    add = parser.add_argument_group("Files and batches").add_argument
    add(
        "--file-dir",
        type=directory,
        metavar="DIR",
        help="folder of /v1/files and /v1/batches, for one server at a time (default: files in "
        "$CHAIRLIFT_CACHE, or else chairlift/files in the user's data folder)",
    )
    add(
        "--file-dir-bytes",
        type=byte_size_or_zero,
        default=_DEFAULTS.file_dir_bytes,
        metavar="SIZE",
        help="maximum size of all files, beyond which uploads and new batches are refused: bytes, "
        "like 4G or 512M; 0 turns files and batches off (default: 10G)",
    )
    add(
        "--max-file-bytes",
        type=byte_size,
        default=_DEFAULTS.max_file_bytes,
        metavar="SIZE",
        help="maximum size of an uploaded file (default: 200M)",
    )
    add(
        "--max-files",
        type=positive,
        default=_DEFAULTS.max_files,
        metavar="N",
        help="maximum number of files (default: %(default)s)",
    )
    add(
        "--max-batch-requests",
        type=positive,
        default=_DEFAULTS.max_batch_requests,
        metavar="N",
        help="maximum number of requests of one batch (default: %(default)s)",
    )
    add(
        "--batch-concurrency",
        type=positive,
        metavar="N",
        help="maximum number of choices that all batches generate at the same time (default: half "
        "of --max-rows)",
    )


def file_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ServerSettings`` for these flags."""
    names = (
        *("file_dir", "file_dir_bytes", "max_file_bytes", "max_files"),
        *("max_batch_requests", "batch_concurrency"),
    )
    return {name: getattr(options, name) for name in names}
