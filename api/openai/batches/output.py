"""Writes the output and error files of a batch that ends."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from chairlift.api.openai.batches.folder import Folder
from chairlift.api.openai.batches.lines import (
    CANCELLED,
    EXPIRED,
    LineError,
    LineRules,
    numbered_lines,
    parse_line,
    result_line,
)
from chairlift.api.openai.batches.replies import Batch, BatchUsage
from chairlift.api.openai.batches.usage import add_usage


class Outputs(NamedTuple):
    """The written files by kind, "output" and "error", and the usage of the requests."""

    paths: dict[str, Path]
    usage: BatchUsage


def write_outputs(
    folder: Folder, batch: Batch, number: int, done: set[int], max_line_bytes: int
) -> Outputs:
    """Writes a batch's results to new incoming files, in the order of its lines.

    Args:
        folder: the folder, which has the results under ``number``.
        batch: the batch.
        number: its number in the table.
        done: the lines that have a result.
        max_line_bytes: the maximum size of an input line.

    Returns:
        The files that are not empty: "output" has the requests that succeeded, and "error" those
        that failed or were not run.
    """
    written: dict[str, Path] = {}
    usage = BatchUsage()
    try:
        for kind, failed in (("output", 0), ("error", 1)):
            path = written[kind] = folder.new_incoming()
            with path.open("wb") as file:
                rows = folder.database.execute(
                    "SELECT result FROM results WHERE batch = ? AND failed = ? ORDER BY line",
                    (number, failed),
                )
                for (text,) in rows:
                    file.write(text)
                    add_usage(usage, text)
                if failed and len(done) < batch.request_counts.total:
                    for text in _not_run(folder, batch, done, max_line_bytes):
                        file.write(text)
                is_empty = file.tell() == 0
            if is_empty:
                written.pop(kind).unlink()
    except BaseException:
        remove(written.values())
        raise
    return Outputs(written, usage)


def remove(paths: Iterable[Path]) -> None:
    """Deletes files, as far as they exist: the batch is tried again, and the disk may be full."""
    for path in paths:
        path.unlink(missing_ok=True)


def _not_run(folder: Folder, batch: Batch, done: set[int], max_line_bytes: int) -> list[bytes]:
    """The error lines of the requests without a result."""
    reason = CANCELLED if batch.status == "cancelling" else EXPIRED
    rules = LineRules(batch.endpoint, None, max_line_bytes, batch.request_counts.total)
    content = folder.content(batch.input_file_id)
    lines: list[bytes] = []
    if not content.is_file():  # somebody has removed it from the folder
        return lines
    for number, text in numbered_lines(content, max_line_bytes):
        if number in done:
            continue
        try:
            custom_id = parse_line(number, text, rules).custom_id
        except LineError:
            continue  # the validation has accepted the file, so its content was changed since
        lines.append(result_line(custom_id, error=reason))
    return lines
