"""The files in the folder: adds, finds, lists and deletes them."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import NamedTuple

import msgspec

from chairlift.api.errors import StorageFull, UnknownFile
from chairlift.api.openai.batches.folder import Folder
from chairlift.api.openai.batches.replies import UNFINISHED, FileObject, Purpose
from chairlift.api.schemas.paging import Page
from chairlift.engine.errors import RequestError

# Characters of a file's name; a name is only ever shown.
MAX_FILENAME = 255

_decode = msgspec.json.Decoder(FileObject).decode


class FileLimits(NamedTuple):
    """The maximum number of files of all owners, and of their bytes."""

    files: int
    total_bytes: int


class FileTable:
    """The files of all owners. A file is visible to its owner only."""

    def __init__(self, folder: Folder, limits: FileLimits) -> None:
        self._folder = folder
        self._limits = limits

    @property
    def total_bytes(self) -> int:
        """The bytes of all files."""
        query = "SELECT coalesce(sum(bytes), 0) FROM files"
        (total,) = self._folder.database.execute(query).fetchone()
        return int(total)

    def check_room(self, size: int) -> None:
        """Checks whether a file of ``size`` bytes may be uploaded.

        Raises:
            StorageFull: a limit would be exceeded.
        """
        (count,) = self._folder.database.execute("SELECT count(*) FROM files").fetchone()
        if count >= self._limits.files:
            raise StorageFull(f"this server keeps at most {self._limits.files} files; delete some")
        if self.total_bytes + size > self._limits.total_bytes:
            raise StorageFull(
                f"this server keeps at most {self._limits.total_bytes} bytes of files; delete some"
            )

    def upload(self, owner: str, filename: str, seconds: int, incoming: Path) -> FileObject:
        """Adds a file that was written to ``incoming``, for ``seconds``.

        Raises:
            StorageFull: there is no room for it.
        """
        self.check_room(incoming.stat().st_size)
        file = self.keep(incoming, filename, "batch", seconds)
        try:
            with self._folder.transaction():
                self.insert(owner, file)
        except BaseException:
            self._folder.content(file.id).unlink(missing_ok=True)
            raise
        return file

    def keep(self, incoming: Path, filename: str, purpose: Purpose, seconds: int) -> FileObject:
        """Moves a written file to its place. It is no file before ``insert`` is committed."""
        now = int(time.time())
        size = incoming.stat().st_size
        name = filename[:MAX_FILENAME]
        file = FileObject(f"file-{uuid.uuid4().hex}", size, now, now + seconds, name, purpose)
        self._folder.keep(incoming, file.id)
        return file

    def insert(self, owner: str, file: FileObject) -> None:
        """Inserts the row of a kept file. Call it in a transaction."""
        self._folder.database.execute(
            "INSERT INTO files (id, owner, purpose, bytes, expires_at, file)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (file.id, owner, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
        )

    def get(self, owner: str, file_id: str, param: str | None = None) -> FileObject:
        """Returns a file of this owner.

        Raises:
            UnknownFile: the owner has no such file; ``param`` is the field that named it.
        """
        row = self._folder.database.execute(
            "SELECT file FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        ).fetchone()
        if row is None:
            raise UnknownFile(f"No such File object: {file_id[:128]}", param)
        return _decode(row[0])

    def content(self, owner: str, file_id: str) -> Path:
        """The path of a file's content.

        Raises:
            UnknownFile: as ``get``, or the content has been removed from the folder.
        """
        path = self._folder.content(self.get(owner, file_id).id)
        if not path.is_file():
            raise UnknownFile(f"the content of {file_id} is no longer there")
        return path

    def page(self, owner: str, purpose: str | None, page: Page) -> tuple[list[FileObject], bool]:
        """A page of the owner's files, of one purpose if given, and whether more follow.

        Raises:
            RequestError: the owner has no file ``page.after``.
        """
        after = self._number_of(owner, page.after)
        direction, compared = page.in_sql
        rows = self._folder.database.execute(
            "SELECT file FROM files WHERE owner = ? AND (? IS NULL OR purpose = ?)"
            f" AND (? IS NULL OR number {compared} ?) ORDER BY number {direction} LIMIT ?",
            (owner, purpose, purpose, after, after, page.limit + 1),
        ).fetchall()
        return [_decode(row[0]) for row in rows[: page.limit]], len(rows) > page.limit

    def delete(self, owner: str, file_id: str) -> None:
        """Deletes a file.

        Raises:
            UnknownFile: as ``get``.
            RequestError: an unfinished batch reads it.
        """
        file = self.get(owner, file_id)
        if batch_id := self._reader_of(file.id):
            raise RequestError(f"{file.id} is the input of {batch_id}, which has not ended")
        self._remove(file.id)

    def delete_expired(self, now: float) -> int:
        """Deletes the files whose time is over and that no unfinished batch reads."""
        rows = self._folder.database.execute(
            "SELECT id FROM files WHERE expires_at <= ?", (int(now),)
        ).fetchall()
        expired = [file_id for (file_id,) in rows if self._reader_of(file_id) is None]
        for file_id in expired:
            self._remove(file_id)
        return len(expired)

    def _remove(self, file_id: str) -> None:
        with self._folder.transaction() as database:
            database.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self._folder.content(file_id).unlink(missing_ok=True)

    def _reader_of(self, file_id: str) -> str | None:
        row = self._folder.database.execute(
            f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {UNFINISHED}",
            (file_id,),
        ).fetchone()
        return None if row is None else str(row[0])

    def _number_of(self, owner: str, file_id: str | None) -> int | None:
        if file_id is None:
            return None
        row = self._folder.database.execute(
            "SELECT number FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        ).fetchone()
        if row is None:
            raise RequestError(f"after: there is no file {file_id[:128]!r}", "after")
        return int(row[0])
