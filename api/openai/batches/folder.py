"""The folder of files and batches: its lock, its database, and the files' contents."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chairlift.api.errors import StorageUnavailable

DATABASE = "files.sqlite3"
# Increases with every change of the tables.
SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    file BLOB NOT NULL
);
CREATE INDEX files_of_owner ON files (owner, number);
CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    output_seconds INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    batch BLOB NOT NULL
);
CREATE INDEX batches_of_owner ON batches (owner, number);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE results (
    batch INTEGER NOT NULL,
    line INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    result BLOB NOT NULL,
    PRIMARY KEY (batch, line)
);
CREATE INDEX results_by_outcome ON results (batch, failed);
"""


def default_folder() -> Path:
    """The folder of a server that is given none.

    It is below ``$CHAIRLIFT_CACHE``, or else in the user's folder for data, which no program
    cleans up.

    Raises:
        StorageUnavailable: the user has no home.
    """
    if chosen := os.environ.get("CHAIRLIFT_CACHE"):
        return Path(chosen).expanduser().absolute() / "files"
    if base := os.environ.get("XDG_DATA_HOME"):
        return Path(base) / "chairlift" / "files"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise StorageUnavailable("there is no folder of files: give --file-dir") from error
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "chairlift" / "files"
    return home / ".local" / "share" / "chairlift" / "files"


class Folder:
    """An open folder, which no other server can open. Used by one thread at a time.

    A file's content is in ``contents`` under its id, which this server made; names that clients
    send are never paths. A content without a row in the database belongs to no file: it is deleted
    when the folder is opened.

    Raises:
        StorageUnavailable: another server uses the folder, or it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._contents = path / "contents"
        self._incoming = path / "incoming"
        self._lock = _locked(path)
        try:
            self._contents.mkdir(exist_ok=True)
            shutil.rmtree(self._incoming, ignore_errors=True)
            self._incoming.mkdir()
            # Transactions are explicit. Only one thread at a time uses it, but not always the same.
            self.database = sqlite3.connect(
                path / DATABASE, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            os.close(self._lock)
            raise StorageUnavailable(f"{path}: {error}") from error
        try:
            self._prepare()
        except StorageUnavailable:
            self.close()
            raise
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise StorageUnavailable(f"{path}: {error}") from error

    def _prepare(self) -> None:
        execute = self.database.execute
        execute("PRAGMA auto_vacuum = FULL")
        execute("PRAGMA journal_mode = WAL")
        # A committed result also survives the machine's crash.
        execute("PRAGMA synchronous = FULL")
        (version,) = execute("PRAGMA user_version").fetchone()
        if version == 0:
            # One transaction: a crash leaves all tables or none.
            script = f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            self.database.executescript(script)
        elif version != SCHEMA_VERSION:
            raise StorageUnavailable(
                f"{self.path} was written by another version of Chairlift (its tables have "
                f"version {version}, this one's {SCHEMA_VERSION}); give this server another folder"
            )
        known = {file_id for (file_id,) in execute("SELECT id FROM files")}
        for content in self._contents.iterdir():
            if content.name not in known:
                content.unlink()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction, committed durably at the end of the block unless that raises."""
        self.database.execute("BEGIN IMMEDIATE")
        try:
            yield self.database
            self.database.execute("COMMIT")
        except BaseException:
            if self.database.in_transaction:
                self.database.execute("ROLLBACK")
            raise

    def new_incoming(self) -> Path:
        """The path of a file to write, which does not exist yet."""
        return self._incoming / uuid.uuid4().hex

    def content(self, file_id: str) -> Path:
        """The path of a file's content. ``file_id`` must be from the database or new."""
        return self._contents / file_id

    def keep(self, incoming: Path, file_id: str) -> None:
        """Moves a written file to the contents, durably. Its row must follow."""
        with incoming.open("rb") as file:
            os.fsync(file.fileno())
        incoming.rename(self.content(file_id))
        _sync_folder(self._contents)

    def close(self) -> None:
        """Closes the database and unlocks the folder."""
        self.database.close()
        os.close(self._lock)


def _locked(path: Path) -> int:
    """Creates the folder if needed and locks it; returns the lock's file descriptor."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageUnavailable(f"{path}: {error.strerror}") from error
    try:
        # The system releases it when the process ends, in whatever way.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise StorageUnavailable(
            f"the folder of files {path} is in use by another server (process {holder}); "
            "give each server its own --file-dir"
        ) from error
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except OSError as error:  # a full disk; locked, the folder would never be opened again
        os.close(lock)
        raise StorageUnavailable(f"{path}: {error.strerror}") from error
    return lock


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
