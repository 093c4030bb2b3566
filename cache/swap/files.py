"""Swap files, and the thread that writes and reads them.

The files have no names, so the system removes them when the process ends, even if it is killed.
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
    """Reads and writes states on one thread, in the order of the calls; no MLX.

    Args:
        directory: created if necessary, readable by its owner only.
        budget_bytes: maximum bytes of all files; the caller enforces it.

    Raises:
        OSError: no file can be created there.
    """

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.budget = budget_bytes
        # Called from the thread after each read or write.
        self.on_change: Callable[[], None] = lambda: None
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._open().close()
        self._thread = ThreadPoolExecutor(1, "swap")

    def write(self, node: SavedNode) -> Future[BinaryIO]:
        """Writes the node to a new file. The future raises OSError if that fails."""
        return self._do(lambda: self._written(node))

    def read(self, file: BinaryIO) -> Future[SavedNode]:
        """Reads the node of a file. The future raises SavedStateError or OSError if that fails."""
        return self._do(lambda: _read(file))

    def close(self) -> None:
        """Ends the thread after its current job."""
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
