"""Files for states that memory has no room for, and the thread that writes and reads them.

They have no names: the system removes them when the process ends, however it does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from chairlift.cache.saved.nodes import SavedNode, node_of, write_node

Done = TypeVar("Done")


class SwapFiles:
    """One thread's work, done in the order in which it was given; no MLX.

    Args:
        directory: made if need be, for the owner's eyes only.
        budget_bytes: what all files may take; whoever has them written has to see to it.

    Raises:
        OSError: no file can be made there.
    """

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.budget = budget_bytes
        # Called from the thread when something is done.
        self.on_change: Callable[[], None] = lambda: None
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open().close()
        self._thread = ThreadPoolExecutor(1, "swap")

    def write(self, node: SavedNode) -> Future[BinaryIO]:
        """A new file with the node. Its result raises OSError if it could not be written."""
        return self._do(lambda: self._written(node))

    def read(self, file: BinaryIO) -> Future[SavedNode]:
        """The node of a file. Its result raises SavedStateError or OSError if that is broken."""
        return self._do(lambda: _read(file))

    def close(self) -> None:
        """Ends the thread, once it has done what it is at."""
        self._thread.shutdown(cancel_futures=True)

    def _open(self) -> BinaryIO:
        return cast(BinaryIO, tempfile.TemporaryFile(dir=self._directory))

    def _written(self, node: SavedNode) -> BinaryIO:
        file = self._open()
        try:
            write_node(file, node)
            file.flush()
        except BaseException:
            file.close()
            raise
        return file

    def _do(self, work: Callable[[], Done]) -> Future[Done]:
        future = self._thread.submit(work)
        future.add_done_callback(lambda _: self.on_change())
        return future


def _read(file: BinaryIO) -> SavedNode:
    file.seek(0)
    return node_of(file, "")
