"""One recurrent layer's state: whatever the model file keeps, a row of the batch a row of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from chairlift.cache.snapshot import StatePiece

# Model files ask for the type; it has no annotations, and checkers would take ours for anything.
if TYPE_CHECKING:
    _ArraysCache = object
else:
    from mlx_lm.models.cache import ArraysCache as _ArraysCache

Slots = Mapping[int, mx.array]


class StateLayer(_ArraysCache):
    """The numbered slots of a recurrent layer, ``[rows, ...]`` each: convolution tail, SSM state.

    It keeps the protocol of mlx-lm's ``ArraysCache``: the model reads a slot (None before its
    first write) and writes it anew each step. Padding would enter the state for good, and no step
    has any: ``make_mask`` is None, and so are ``lengths`` and ``left_padding``.
    """

    lengths = None
    left_padding = None

    def __init__(self, slots: int = 0) -> None:
        self._size = slots
        # NOTE: not the parent's, whose list of slots this replaces.
        self._slots: dict[int, mx.array] = {}
        self._rows = 0

    def __getitem__(self, slot: int) -> mx.array | None:
        return self._slots.get(slot)

    def __iter__(self) -> Iterator[mx.array | None]:
        return iter(self.cache)

    def __setitem__(self, slot: int, value: mx.array | None) -> None:
        if value is None:
            self._slots.pop(slot, None)
        else:
            # A tail cut out of a chunk would keep the whole chunk.
            self._slots[slot] = mx.contiguous(value)

    @property
    def cache(self) -> list[mx.array | None]:
        """All slots by number, as mlx-lm names them."""
        size = max(self._size, max(self._slots, default=-1) + 1)
        return [self._slots.get(slot) for slot in range(size)]

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

    def join(self) -> None:
        """Adds a row at its beginning: zeros."""
        for slot, array in self._slots.items():
            row = mx.zeros((1, *array.shape[1:]), array.dtype)
            self._slots[slot] = mx.concatenate([array, row])
        self._rows += 1

    def put(self, row: int, piece: StatePiece | None) -> None:
        """Gives a row a state, None for the beginning; the others keep theirs."""
        given = dict(enumerate(piece.slots)) if piece else {}
        for slot in {*self._slots, *given}:
            mine, new = self._slots.get(slot), given.get(slot)
            if mine is None and new is not None:
                mine = mx.zeros((self._rows, *new.shape[1:]), new.dtype)
            if mine is not None:
                new = mx.zeros_like(mine[:1]) if new is None else new
                mine, new = _level(mine, new)
                self._slots[slot] = mx.concatenate([mine[:row], new, mine[row + 1 :]])

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

    def checkpoint(self) -> Slots:
        """The state as it is now, all rows: arrays that no later step writes to."""
        return dict(self._slots)

    def settle(self, checkpoints: Mapping[int, Slots], kept: Sequence[int]) -> None:
        """Row ``r`` goes back to the state ``checkpoints[kept[r]]``, bit for bit.

        A slot that a checkpoint lacks was not written by then: zeros for its rows, if others have
        it; and no slot at all if none has.
        """
        wanted = {key: checkpoints[key] for key in dict.fromkeys(kept)}
        names = sorted({slot for slots in wanted.values() for slot in slots})
        self._slots = {slot: _chosen(slot, wanted, kept) for slot in names}

    def reset(self) -> None:
        """Removes all rows and gives the memory back."""
        self._slots = {}
        self._rows = 0

    def check_integrity(self, rows: int) -> None:
        """Asserts what must hold between two steps of a batch of ``rows``."""
        assert self._rows == rows, (self._rows, rows)
        for slot, array in self._slots.items():
            assert array.shape[0] == rows, (slot, array.shape, rows)


def _chosen(slot: int, checkpoints: Mapping[int, Slots], kept: Sequence[int]) -> mx.array:
    """One slot, each row as the checkpoint that is its own has it."""
    like = next(slots[slot] for slots in checkpoints.values() if slot in slots)
    chosen: mx.array | None = None
    for key, slots in checkpoints.items():
        array = slots.get(slot)
        array = mx.zeros_like(like) if array is None else array
        if chosen is None:
            chosen = array
        else:
            rows = mx.array([own == key for own in kept]).reshape(-1, *[1] * (array.ndim - 1))
            chosen = mx.where(rows, array, chosen)
    assert chosen is not None
    return chosen


def _level(one: mx.array, other: mx.array) -> tuple[mx.array, mx.array]:
    """Both with the same axis 1: a tail that is still growing has zeros before its beginning."""
    if one.ndim < 2 or one.shape[1] == other.shape[1]:
        return one, other
    width = max(one.shape[1], other.shape[1])
    rest = [(0, 0)] * (one.ndim - 2)
    longer = [mx.pad(x, [(0, 0), (width - x.shape[1], 0), *rest]) for x in (one, other)]
    return longer[0], longer[1]
