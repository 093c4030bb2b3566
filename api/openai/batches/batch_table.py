"""The batches in the folder and the results of their requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from chairlift.api.errors import StorageFull, UnknownBatch
from chairlift.api.openai.batches.file_table import FileTable
from chairlift.api.openai.batches.folder import Folder
from chairlift.api.openai.batches.output import remove, write_outputs
from chairlift.api.openai.batches.replies import (
    UNFINISHED,
    Batch,
    BatchStatus,
    FileObject,
    RequestCounts,
)
from chairlift.api.schemas.paging import Page
from chairlift.engine.errors import RequestError

MAX_UNFINISHED = 256
# Twice the longest completion window; a batch's files have their own time.
KEPT_SECONDS = 60 * 86400
_IS_UNFINISHED = f"status IN {UNFINISHED}"

_decode = msgspec.json.Decoder(Batch).decode


class Result(NamedTuple):
    """The result of one request: a line of the output or error file."""

    line: int
    failed: bool
    text: bytes


class Unfinished(NamedTuple):
    """A batch that has not ended, and its owner."""

    owner: str
    batch: Batch


class BatchTable:
    """The batches of all owners. A batch is visible to its owner only.

    A batch's results are in a table of their own until it ends; then they become its files, in one
    transaction with its last status.
    """

    def __init__(self, folder: Folder, files: FileTable) -> None:
        self._folder = folder
        self._files = files

    def create(self, owner: str, batch: Batch, output_seconds: int) -> Batch:
        """Adds a batch, whose output files are kept for ``output_seconds``.

        Raises:
            UnknownFile: the owner has no such input file.
            RequestError: the file is no input of batches.
            StorageFull: there are too many unfinished batches, or no room for more files.
        """
        file = self._files.get(owner, batch.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise RequestError(
                f"the purpose of {file.id} is {file.purpose}; it must be batch", "input_file_id"
            )
        self._files.check_room(0)
        with self._folder.transaction() as database:
            (count,) = database.execute(
                f"SELECT count(*) FROM batches WHERE {_IS_UNFINISHED}"
            ).fetchone()
            if count >= MAX_UNFINISHED:
                raise StorageFull(f"this server has {count} unfinished batches already")
            database.execute(
                "INSERT INTO batches (id, owner, status, input_file_id, output_seconds, created_at,"
                " batch) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(batch.id, owner, batch.status, batch.input_file_id, output_seconds),
                    *(batch.created_at, msgspec.json.encode(batch)),
                ),
            )
        return batch

    def get(self, owner: str, batch_id: str) -> Batch:
        """Returns a batch of this owner, with its counts so far.

        Raises:
            UnknownBatch: the owner has no such batch.
        """
        row = self._folder.database.execute(
            "SELECT batch FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        ).fetchone()
        if row is None:
            raise UnknownBatch(f"No batch found with id '{batch_id[:128]}'.")
        return self._with_counts(_decode(row[0]))

    def page(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """A page of the owner's batches, and whether more follow.

        Raises:
            RequestError: the owner has no batch ``page.after``.
        """
        database = self._folder.database
        after = None
        if page.after is not None:
            row = database.execute(
                "SELECT number FROM batches WHERE id = ? AND owner = ?", (page.after, owner)
            ).fetchone()
            if row is None:
                raise RequestError(f"after: there is no batch {page.after[:128]!r}", "after")
            after = row[0]
        direction, compared = page.in_sql
        rows = database.execute(
            f"SELECT batch FROM batches WHERE owner = ? AND (? IS NULL OR number {compared} ?)"
            f" ORDER BY number {direction} LIMIT ?",
            (owner, after, after, page.limit + 1),
        ).fetchall()
        batches = [self._with_counts(_decode(row[0])) for row in rows[: page.limit]]
        return batches, len(rows) > page.limit

    def unfinished(self) -> list[Unfinished]:
        """All batches that have not ended, oldest first; their counts are not filled in."""
        rows = self._folder.database.execute(
            f"SELECT owner, batch FROM batches WHERE {_IS_UNFINISHED} ORDER BY number"
        ).fetchall()
        return [Unfinished(owner, _decode(batch)) for owner, batch in rows]

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Marks a batch as to be cancelled.

        Raises:
            UnknownBatch: as ``get``.
            RequestError: it has ended, or is about to.
        """
        batch = self.get(owner, batch_id)
        if batch.status not in ("validating", "in_progress", "cancelling"):
            raise RequestError(f"Cannot cancel a batch with status '{batch.status}'.")
        now = int(time.time())
        self.change(
            batch_id,
            ("validating", "in_progress"),
            lambda batch: replace(batch, status="cancelling", cancelling_at=now),
        )
        return self.get(owner, batch_id)

    def change(
        self, batch_id: str, expected: Iterable[BatchStatus], change: Callable[[Batch], Batch]
    ) -> Batch | None:
        """Replaces a batch by ``change`` of it; None if its status is not an expected one."""
        with self._folder.transaction() as database:
            (encoded,) = database.execute(
                "SELECT batch FROM batches WHERE id = ?", (batch_id,)
            ).fetchone()
            batch = _decode(encoded)
            if batch.status not in expected:
                return None
            changed = change(batch)
            self._update(changed)
        return changed

    def add_results(self, batch_id: str, results: Iterable[Result]) -> None:
        """Adds results durably. Those of a line that has one, or of an ended batch, are dropped."""
        with self._folder.transaction() as database:
            row = database.execute(
                "SELECT number FROM batches WHERE id = ? AND status IN"
                " ('in_progress', 'finalizing', 'cancelling')",
                (batch_id,),
            ).fetchone()
            if row is not None:
                database.executemany(
                    "INSERT OR IGNORE INTO results (batch, line, failed, result)"
                    " VALUES (?, ?, ?, ?)",
                    [(row[0], *result) for result in results],
                )

    def lines_done(self, batch_id: str) -> set[int]:
        """The numbers of the lines that have a result."""
        rows = self._folder.database.execute(
            "SELECT line FROM results WHERE batch = (SELECT number FROM batches WHERE id = ?)",
            (batch_id,),
        )
        return {line for (line,) in rows}

    def finish(self, batch_id: str, max_line_bytes: int) -> Batch:
        """Ends a batch: its results become its output and error files.

        Requests without a result make it ``expired``, unless it is being cancelled; they are in the
        error file, too.
        """
        database = self._folder.database
        number, owner, seconds, encoded = database.execute(
            "SELECT number, owner, output_seconds, batch FROM batches WHERE id = ?", (batch_id,)
        ).fetchone()
        batch = self._with_counts(_decode(encoded))
        done = self.lines_done(batch_id)
        written = write_outputs(self._folder, batch, number, done, max_line_bytes)
        now = int(time.time())
        if batch.status == "cancelling":
            batch = replace(batch, status="cancelled", cancelled_at=now)
        elif batch.status == "validating" or len(done) < batch.request_counts.total:
            batch = replace(batch, status="expired", expired_at=now)
        else:
            batch = replace(batch, status="completed", completed_at=now)
        batch.usage = written.usage
        kept: dict[str, FileObject] = {}
        try:
            for kind, path in written.paths.items():
                name = f"{batch_id}_{kind}.jsonl"
                kept[kind] = self._files.keep(path, name, "batch_output", seconds)
            if "output" in kept:
                batch.output_file_id = kept["output"].id
            if "error" in kept:
                batch.error_file_id = kept["error"].id
            with self._folder.transaction() as database:
                for file in kept.values():
                    self._files.insert(owner, file)
                self._update(batch)
                database.execute("DELETE FROM results WHERE batch = ?", (number,))
        except BaseException:
            remove(self._folder.content(file.id) for file in kept.values())
            remove(written.paths.values())
            raise
        return batch

    def forget_old(self, now: float) -> None:
        """Deletes the records of batches that ended long ago."""
        with self._folder.transaction() as database:
            database.execute(
                f"DELETE FROM batches WHERE created_at <= ? AND NOT {_IS_UNFINISHED}",
                (int(now) - KEPT_SECONDS,),
            )

    def _update(self, batch: Batch) -> None:
        self._folder.database.execute(
            "UPDATE batches SET status = ?, batch = ? WHERE id = ?",
            (batch.status, msgspec.json.encode(batch), batch.id),
        )

    def _with_counts(self, batch: Batch) -> Batch:
        """The batch with the counts of its results; those of an ended batch are stored in it."""
        if batch.status not in UNFINISHED:
            return batch
        counts = dict(
            self._folder.database.execute(
                "SELECT failed, count(*) FROM results WHERE batch ="
                " (SELECT number FROM batches WHERE id = ?) GROUP BY failed",
                (batch.id,),
            )
        )
        total = batch.request_counts.total
        return replace(
            batch, request_counts=RequestCounts(total, counts.get(0, 0), counts.get(1, 0))
        )
