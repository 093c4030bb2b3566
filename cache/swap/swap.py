"""Swap space: keeps the states of preempted rows until there is room for the rows again.

A state belongs to one row: it is not shared or evicted, and the row resumes from it bit for bit. A
state is first kept in memory. Once more than half of the memory is used, the states that will be
needed last go to disk (if there is a directory), to leave room for the next preempted rows; they
are read back before their turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, BinaryIO, Generic, Literal, NamedTuple, TypeVar

import mlx.core as mx

from chairlift.cache.saved.layers import detached, pack
from chairlift.cache.saved.nodes import SavedNode, make_node
from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.snapshot import LayerKind, Snapshot, merged
from chairlift.cache.swap.files import SwapFiles

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Place = Literal["memory", "disk"]
# Bytes of a token id in a node.
TOKEN_BYTES = 4


class _Fresh(NamedTuple):
    """A state on the device, possibly not evaluated yet."""

    tokens: list[int]
    snapshot: Snapshot


class _Filed(NamedTuple):
    """A state on disk, and its bytes."""

    file: BinaryIO
    nbytes: int


@dataclass(slots=True, eq=False)
class _State:
    """The state after a row's first ``stop`` tokens.

    Attributes:
        stop: the tokens that the state covers.
        nbytes: its size in memory.
        form: where it is; unchanged while it is being written or read.
        place: the slowest place it has been in.
        stays: whether writing it to disk has failed, so that it stays in memory.
    """

    stop: int
    nbytes: int
    form: _Fresh | SavedNode | _Filed
    place: Place = "memory"
    stays: bool = False

    @property
    def on_disk(self) -> bool:
        return isinstance(self.form, _Filed)


@dataclass(frozen=True, slots=True)
class _Job(Generic[Key]):
    """The thread's current job: it reads the state if that is on disk, else writes it."""

    key: Key
    state: _State
    future: Future[BinaryIO] | Future[SavedNode]


class Swap(Generic[Key]):
    """States by the key of their row. Not thread-safe; the files have their own thread.

    Args:
        kinds: each layer's kind.
        budget: bytes of memory, including states being read or written; 0 stores nothing.
        files: the disk storage; None uses memory only.
        offloads: copy states out of MLX's memory, because that is the accelerator's.
        rank: sort key of a row; the lowest resumes first. Used only with files.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        budget: int,
        files: SwapFiles | None = None,
        offloads: bool = False,
        rank: Callable[[Key], Any] = lambda key: key,
    ) -> None:
        self.budget = budget
        self._kinds = tuple(kinds)
        self._files = files
        self._offloads = offloads
        self._rank = rank
        self._states: dict[Key, _State] = {}
        self._job: _Job[Key] | None = None
        # Memory reserved for the first state on disk, so that no other state takes it.
        self._reserved = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        states = {state for state in self._states.values() if not state.on_disk}
        return sum(state.nbytes for state in (states | {self._job.state} if self._job else states))

    @property
    def disk_nbytes(self) -> int:
        """Bytes of files."""
        states = {*self._states.values(), *([self._job.state] if self._job else [])}
        forms = [state.form for state in states]
        return sum(form.nbytes for form in forms if isinstance(form, _Filed))

    @property
    def due(self) -> bool:
        """Whether ``work`` has a finished job to collect."""
        return self._job is not None and self._job.future.done()

    @property
    def pending(self) -> list[mx.array]:
        """Copies to evaluate before their source buffers change."""
        forms = [state.form for state in self._states.values()]
        return [a for form in forms if isinstance(form, _Fresh) for a in form.snapshot.arrays]

    def on_due(self, wake: Callable[[], None]) -> None:
        """Sets the function that is called, from another thread, when ``due`` may be true."""
        if self._files is not None:
            self._files.on_change = wake

    def put(self, key: Key, tokens: Sequence[int], snapshot: Snapshot) -> bool:
        """Stores a copy of a row's state, which covers the first ``snapshot.stop`` of ``tokens``.

        The copy is lazy (see ``pending``) and cannot be taken before the next ``move_to_host``.

        Returns:
            Whether there was room.
        """
        state = merged(self._kinds, [snapshot])
        nbytes = state.nbytes + TOKEN_BYTES * state.stop
        if self.nbytes + self._reserved + nbytes > self.budget:
            return False
        fresh = _Fresh(list(tokens[: state.stop]), state.loaded().copy())
        self._states[key] = _State(state.stop, nbytes, fresh)
        return True

    def move_to_host(self) -> None:
        """Converts the states put since the last call, now evaluated, to host memory."""
        for key, state in list(self._states.items()):
            if not isinstance(state.form, _Fresh):
                continue
            tokens, snapshot = state.form
            try:
                layers = pack(self._kinds, snapshot)
            except SavedStateError as error:
                log.warning("%s: a preempted row is computed again", error)
                del self._states[key]
                continue
            state.form = make_node(
                "", "", tokens, 0, detached(layers) if self._offloads else layers
            )

    def covers(self, key: Key) -> int:
        """The number of tokens that a row's state covers; 0 if there is none."""
        state = self._states.get(key)
        return state.stop if state else 0

    def place(self, key: Key) -> Place | None:
        """The slowest place that a state has been in; None if there is no state."""
        state = self._states.get(key)
        return state.place if state else None

    def fetching(self, key: Key) -> bool:
        """Whether a state is still on disk."""
        state = self._states.get(key)
        return state is not None and state.on_disk

    def take(self, key: Key) -> Snapshot:
        """Removes and returns a state that is neither ``fetching`` nor just put."""
        form = self._states.pop(key).form
        assert isinstance(form, SavedNode), "it is on disk, or not in host memory yet"
        return form.snapshot()

    def drop(self, key: Key) -> None:
        """Drops a state, if there is one."""
        state = self._states.pop(key, None)
        if state is not None and (self._job is None or self._job.state is not state):
            _close(state.form)

    def work(self) -> list[Key]:
        """Collects the finished job of the file thread and starts the next one.

        Returns:
            The keys whose states have just moved to disk.
        """
        if self._files is None:
            return []
        filed = []
        if self._job is not None and self._job.future.done():
            job, self._job = self._job, None
            self._apply(job, self._files.budget)
            filed = [job.key] if self.fetching(job.key) else []
        if self._job is None:
            keys = sorted(self._states, key=self._rank)
            self._job = self._read_next(self._files, keys) or self._write_next(self._files, keys)
        return filed

    def close(self) -> None:
        """Drops all states and ends the thread."""
        states = {*self._states.values(), *([self._job.state] if self._job else [])}
        self._states = {}
        if self._files is not None:
            self._files.close()
        if self._job is not None and not self._job.future.cancelled():
            self._apply(self._job, 0)
        self._job = None
        for state in states:
            _close(state.form)

    def _read_next(self, files: SwapFiles, keys: Sequence[Key]) -> _Job[Key] | None:
        """Reads the first state on disk; if others precede it, only if half the memory is free."""
        self._reserved = 0
        on_disk = [key for key in keys if self.fetching(key)]
        if not on_disk:
            return None
        key, state = on_disk[0], self._states[on_disk[0]]
        assert isinstance(state.form, _Filed)
        first = key == keys[0]
        if self.nbytes + state.nbytes <= (self.budget if first else self.budget // 2):
            return _Job(key, state, files.read(state.form.file))
        self._reserved = state.nbytes if first else 0
        return None

    def _write_next(self, files: SwapFiles, keys: Sequence[Key]) -> _Job[Key] | None:
        """Writes the state that is needed last, if too much memory is in use."""
        if self.nbytes <= min(self.budget // 2, self.budget - self._reserved):
            return None
        room = files.budget - self.disk_nbytes
        for key in reversed(keys[1:]):
            state = self._states[key]
            if isinstance(state.form, SavedNode) and not state.stays and state.nbytes <= room:
                return _Job(key, state, files.write(state.form))
        return None

    def _apply(self, job: _Job[Key], disk_budget: int) -> None:
        """Applies the result of a finished job, whose state may have been dropped meanwhile."""
        state = job.state
        needed = self._states.get(job.key) is state
        try:
            result = job.future.result()
        except (OSError, SavedStateError) as error:
            log.warning("%s: a preempted row cannot be %s", error, _verb(state))
            state.stays = True
            if state.on_disk:
                _close(state.form)
                if needed:
                    del self._states[job.key]
            return
        if isinstance(result, SavedNode):
            _close(state.form)
            state.form = result
            return
        nbytes = result.seek(0, 2)
        state.stays = self.disk_nbytes + nbytes > disk_budget
        if needed and not state.stays:
            state.form, state.place = _Filed(result, nbytes), "disk"
        else:
            result.close()


def _verb(state: _State) -> str:
    return "read from disk and is computed again" if state.on_disk else "written to disk"


def _close(form: _Fresh | SavedNode | _Filed) -> None:
    if isinstance(form, _Filed):
        form.file.close()
