"""Where the states of preempted rows wait until there is room for the rows again.

A state is the row's own: nobody else finds it, nothing is evicted, and the row goes on from it bit
for bit. What is put here is in memory first. Once more than half of that is taken, those who have
to wait longest go to disk, if there is one, so that there is room for who is preempted next; and
they are read back before their turn comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, BinaryIO, Generic, Literal, NamedTuple, TypeVar

import mlx.core as mx

from chairlift.cache.saved.layers import own, pack
from chairlift.cache.saved.nodes import SavedNode, make_node
from chairlift.cache.saved.safetensors import SavedStateError
from chairlift.cache.snapshot import LayerKind, Snapshot, merged
from chairlift.cache.swap.files import SwapFiles

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Place = Literal["memory", "disk"]
# Of a token's id in a node.
TOKEN_BYTES = 4


class _Fresh(NamedTuple):
    """On the device, and maybe not evaluated yet."""

    tokens: list[int]
    snapshot: Snapshot


class _Filed(NamedTuple):
    """On disk, in so many bytes."""

    file: BinaryIO
    nbytes: int


@dataclass(slots=True, eq=False)
class _State:
    """The state after a row's first ``stop`` tokens, which takes ``nbytes`` of memory.

    While it is being written or read it has its old form. ``place`` is the slowest it has been in;
    ``stays``: the disk would not take it.
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
    """What the thread is at: a state that is read if it is on disk, else written."""

    key: Key
    state: _State
    future: Future[BinaryIO] | Future[SavedNode]


class Swap(Generic[Key]):
    """States by whose they are. For one thread, beside that of the files.

    Args:
        kinds: what each layer keeps.
        budget: bytes of memory, those on their way to and from disk included; 0 takes nothing.
        files: where more of them go; None: nowhere.
        offloads: states are copied out of MLX's memory, which is the accelerator's.
        rank: who will be taken first ranks lowest; asked only where there are files.
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
        # Memory that the first on disk waits for, so that nobody else takes it.
        self._reserved = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        held = {state for state in self._states.values() if not state.on_disk}
        return sum(state.nbytes for state in (held | {self._job.state} if self._job else held))

    @property
    def disk_nbytes(self) -> int:
        """Bytes of files."""
        states = {*self._states.values(), *([self._job.state] if self._job else [])}
        forms = [state.form for state in states]
        return sum(form.nbytes for form in forms if isinstance(form, _Filed))

    @property
    def due(self) -> bool:
        """Whether ``work`` has something to take in."""
        return self._job is not None and self._job.future.done()

    @property
    def pending(self) -> list[mx.array]:
        """Copies that have to be evaluated before the buffers they are taken from change."""
        forms = [state.form for state in self._states.values()]
        return [a for form in forms if isinstance(form, _Fresh) for a in form.snapshot.arrays]

    def on_due(self, wake: Callable[[], None]) -> None:
        """Has ``wake`` called, from another thread, whenever something may have become ``due``."""
        if self._files is not None:
            self._files.on_change = wake

    def put(self, key: Key, tokens: Sequence[int], snapshot: Snapshot) -> bool:
        """Takes a copy of the state after the first of ``tokens``, as many as it covers.

        It is lazy (see ``pending``) until ``settle``, before which nobody may take it.

        Returns:
            Whether there was room.
        """
        state = merged(self._kinds, [snapshot])
        nbytes = state.nbytes + TOKEN_BYTES * state.stop
        if self.nbytes + self._reserved + nbytes > self.budget:
            return False
        fresh = _Fresh(list(tokens[: state.stop]), state.copy())
        self._states[key] = _State(state.stop, nbytes, fresh)
        return True

    def settle(self) -> None:
        """Takes what was put, and has been evaluated by now, out of the device's memory."""
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
            state.form = make_node("", "", tokens, 0, own(layers) if self._offloads else layers)

    def covers(self, key: Key) -> int:
        """How many first tokens of its row a state covers; 0 if there is none."""
        state = self._states.get(key)
        return state.stop if state else 0

    def place(self, key: Key) -> Place | None:
        """Where a state is, or was before it was read; None if there is none."""
        state = self._states.get(key)
        return state.place if state else None

    def fetching(self, key: Key) -> bool:
        """Whether a state has to be read from disk first."""
        state = self._states.get(key)
        return state is not None and state.on_disk

    def take(self, key: Key) -> Snapshot:
        """A state, which is here no more; one that is neither ``fetching`` nor just put."""
        form = self._states.pop(key).form
        assert isinstance(form, SavedNode), "it is on disk, or not settled"
        return form.snapshot()

    def drop(self, key: Key) -> None:
        """Nobody wants a state any more, if there is one."""
        state = self._states.pop(key, None)
        if state is not None and (self._job is None or self._job.state is not state):
            _close(state.form)

    def work(self) -> list[Key]:
        """Takes in what the thread of the files has done, and gives it the next to do.

        Returns:
            Whose states are on disk now and were not before.
        """
        if self._files is None:
            return []
        filed = []
        if self._job is not None and self._job.future.done():
            job, self._job = self._job, None
            self._take_in(job, self._files.budget)
            filed = [job.key] if self.fetching(job.key) else []
        if self._job is None:
            line = sorted(self._states, key=self._rank)
            self._job = self._read_next(self._files, line) or self._write_next(self._files, line)
        return filed

    def close(self) -> None:
        """Forgets everything, and ends the thread."""
        states = {*self._states.values(), *([self._job.state] if self._job else [])}
        self._states = {}
        if self._files is not None:
            self._files.close()
        if self._job is not None and not self._job.future.cancelled():
            self._take_in(self._job, 0)
        self._job = None
        for state in states:
            _close(state.form)

    def _read_next(self, files: SwapFiles, line: Sequence[Key]) -> _Job[Key] | None:
        """Who is first on disk; if others come before, only while half the memory stays free."""
        self._reserved = 0
        on_disk = [key for key in line if self.fetching(key)]
        if not on_disk:
            return None
        key, state = on_disk[0], self._states[on_disk[0]]
        assert isinstance(state.form, _Filed)
        first = key == line[0]
        if self.nbytes + state.nbytes <= (self.budget if first else self.budget // 2):
            return _Job(key, state, files.read(state.form.file))
        self._reserved = state.nbytes if first else 0
        return None

    def _write_next(self, files: SwapFiles, line: Sequence[Key]) -> _Job[Key] | None:
        """Who has to wait longest, if more memory is taken than there should be."""
        if self.nbytes <= min(self.budget // 2, self.budget - self._reserved):
            return None
        room = files.budget - self.disk_nbytes
        for key in reversed(line[1:]):
            state = self._states[key]
            if isinstance(state.form, SavedNode) and not state.stays and state.nbytes <= room:
                return _Job(key, state, files.write(state.form))
        return None

    def _take_in(self, job: _Job[Key], most: int) -> None:
        """What a read or a write has come to, of a state that may not be wanted any more."""
        state = job.state
        wanted = self._states.get(job.key) is state
        try:
            result = job.future.result()
        except (OSError, SavedStateError) as error:
            log.warning("%s: a preempted row cannot be %s", error, _verb(state))
            state.stays = True
            if state.on_disk:
                _close(state.form)
                if wanted:
                    del self._states[job.key]
            return
        if isinstance(result, SavedNode):
            _close(state.form)
            state.form = result
            return
        nbytes = result.seek(0, 2)
        state.stays = self.disk_nbytes + nbytes > most
        if wanted and not state.stays:
            state.form, state.place = _Filed(result, nbytes), "disk"
        else:
            result.close()


def _verb(state: _State) -> str:
    return "read from disk and is computed again" if state.on_disk else "written to disk"


def _close(form: _Fresh | SavedNode | _Filed) -> None:
    if isinstance(form, _Filed):
        form.file.close()
