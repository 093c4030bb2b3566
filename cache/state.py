"""One recurrent layer's state: whatever the model file keeps, a row of the batch a row of it."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from chairlift.cache.snapshot import StatePiece


class StateLayer:
    """The numbered slots of a recurrent layer, ``[rows, ...]`` each: convolution tail, SSM state.

    It keeps the protocol of mlx-lm's ``ArraysCache``: the model reads a slot (None before its
    first write) and writes it anew each step. Padding would enter the state for good, and no step
    has any: ``make_mask`` is None, and so are ``lengths`` and ``left_padding``.
    """

    lengths = None
    left_padding = None

    def __init__(self) -> None:
        self._slots: dict[int, mx.array] = {}
        self._rows = 0

    def __getitem__(self, slot: int) -> mx.array | None:
        return self._slots.get(slot)

    def __setitem__(self, slot: int, value: mx.array | None) -> None:
        if value is None:
            self._slots.pop(slot, None)
        else:
            # A tail cut out of a chunk would keep the whole chunk.
            self._slots[slot] = mx.contiguous(value)

    @property
    def cache(self) -> list[mx.array | None]:
        """All slots by number, as mlx-lm names them."""
        return [self._slots.get(slot) for slot in range(max(self._slots, default=-1) + 1)]

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._rows

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The slots that there are, for inspection and for evaluating them."""
        return tuple(self._slots.values())

    @property
    def nbytes(self) -> int:
        """Bytes the slots take."""
        return sum(int(array.nbytes) for array in self._slots.values())

    def empty(self) -> bool:
        """Whether nothing has been written yet."""
        return not self._slots

    def make_mask(self, n: int) -> None:
        """No mask: every token of a step is a row's own."""

    def advance(self, n: int) -> None:
        """Nothing to count: the state is all there is."""

    def join(self, piece: StatePiece | None) -> None:
        """Adds a row with a state, or one at its beginning: zeros."""
        mine = self._slots
        theirs = dict(enumerate(piece.slots)) if piece else {}
        for slot in {*mine, *theirs}:
            old, new = mine.get(slot), theirs.get(slot)
            if new is None and old is not None:
                new = mx.zeros((1, *old.shape[1:]), old.dtype)
            if old is None and new is not None and self._rows:
                old = mx.zeros((self._rows, *new.shape[1:]), new.dtype)
            parts = [part for part in (old, new) if part is not None]
            if parts:
                mine[slot] = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        self._rows += 1

    def rearrange(self, order: Sequence[int]) -> None:
        """Keeps the rows of ``order``, in that order."""
        if list(order) != list(range(self._rows)):
            rows = mx.array(list(order), mx.int32)
            self._slots = {slot: array[rows] for slot, array in self._slots.items()}
        self._rows = len(order)

    def get(self, row: int) -> StatePiece | None:
        """One row's state, None before the first write."""
        if not self._slots:
            return None
        return StatePiece(tuple(None if s is None else s[row : row + 1] for s in self.cache))

    def reset(self) -> None:
        """Removes all rows and gives the memory back."""
        self._slots = {}
        self._rows = 0

    def check_integrity(self, rows: int) -> None:
        """Asserts what must hold between two steps of a batch of ``rows``."""
        assert self._rows == rows, (self._rows, rows)
        for slot, array in self._slots.items():
            assert array.shape[0] == rows, (slot, array.shape, rows)
