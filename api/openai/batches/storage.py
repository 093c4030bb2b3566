"""The folder of files and batches as handlers use it: all its work is done by one thread."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from chairlift.api.errors import StorageUnavailable
from chairlift.api.openai.batches.batch_table import BatchTable
from chairlift.api.openai.batches.file_table import FileLimits, FileTable
from chairlift.api.openai.batches.folder import DATABASE, Folder, default_folder
from chairlift.api.settings import ServerSettings
from chairlift.engine.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tables:
    """The open folder and its tables. Only the storage's thread uses them."""

    folder: Folder
    files: FileTable
    batches: BatchTable


class Storage:
    """The folder, which is opened when it is first used.

    Attributes:
        uploads: the number of files that are being uploaded.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._path = settings.file_dir
        self._limits = FileLimits(settings.max_files, settings.file_dir_bytes)
        # One thread: a transaction is never disturbed by another, and none blocks the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._tables: Tables | None = None
        self._is_closed = False
        self.uploads = 0

    @property
    def is_open(self) -> bool:
        """Whether this server holds the folder."""
        return self._tables is not None

    async def exists(self) -> bool:
        """Whether a server has used the folder before, and this one may read it."""
        return await asyncio.to_thread(self._exists)

    async def open(self) -> None:
        """Opens the folder if it is not open yet.

        Raises:
            StorageUnavailable: another server uses it, or the disk fails.
        """
        await self.run(lambda tables: None)

    async def run(self, work: Callable[[Tables], T]) -> T:
        """Calls ``work`` in the storage's thread, and opens the folder first if needed.

        Once it was called it also runs if the caller is cancelled.

        Raises:
            StorageUnavailable: as ``open``, or a read or write has failed.
            RequestError: this server keeps no files; or whatever ``work`` raises.
        """
        if not self._limits.total_bytes:
            raise RequestError("files and batches are not supported: this server keeps no files")
        if self._is_closed:
            raise StorageUnavailable("the server is about to stop")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._run, work)

    async def close(self) -> None:
        """Finishes the work that was begun, and closes and unlocks the folder."""
        self._is_closed = True
        await asyncio.to_thread(self._thread.shutdown)
        if self._tables is not None:
            self._tables.folder.close()
            self._tables = None

    def _exists(self) -> bool:
        try:
            return ((self._path or default_folder()) / DATABASE).exists()
        except OSError:
            return False

    def _run(self, work: Callable[[Tables], T]) -> T:
        try:
            if self._tables is None:
                folder = Folder(self._path or default_folder())
                files = FileTable(folder, self._limits)
                self._tables = Tables(folder, files, BatchTable(folder, files))
            return work(self._tables)
        except StorageUnavailable:
            raise
        except (sqlite3.Error, OSError) as error:
            raise StorageUnavailable(f"the folder of files cannot be used: {error}") from error


STORAGE: web.AppKey[Storage] = web.AppKey("storage", Storage)
