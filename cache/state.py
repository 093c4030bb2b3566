"""One recurrent layer's state, with a row for each row of the batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from chairlift.cache.snapshot import StatePiece

# Model files check for this type. It has no annotations: with it as a base, type checkers would
# accept any attribute of ours.
if TYPE_CHECKING:
    _ArraysCache = object
else:
    from mlx_lm.models.cache import ArraysCache as _ArraysCache

Slots = Mapping[int, mx.array]


class StateLayer(_ArraysCache):
    """The numbered slots of a recurrent layer, ``[rows, ...]`` each: convolution tail, SSM state.

    Implements the protocol of mlx-lm's ``ArraysCache``, and what mlx-vlm's adds to it: the model
    reads a slot (None before its first write) and rewrites it each step. Padding would corrupt the
    state, so ``make_mask`` and ``left_padding`` are None. ``lengths``, the number of each
    row's tokens, is None, too, except in a call with padding after them, for models that read it.

    NOTE: ``host_state`` changes an array that the layer holds. Others get handles of their own, so
    that MLX knows of them, and copies the memory first.
    """

    lengths: mx.array | None = None
    left_padding = None

    def __init__(self, slots: int = 0) -> None:
        self._size = slots
        # NOTE: does not call the parent's __init__; this dictionary replaces its list of slots.
        self._slots: dict[int, mx.array] = {}
        self._rows = 0

    @classmethod
    def of(cls, slots: Slots, size: int, rows: int, lengths: mx.array | None = None) -> StateLayer:
        """A layer of ``rows`` rows with these states, each of ``size`` arrays."""
        layer = cls(size)
        layer._slots, layer._rows, layer.lengths = _handles(slots), rows, lengths
        return layer

    def __getitem__(self, slot: int) -> mx.array | None:
        _lent.layer, _lent.slot = weakref.ref(self), slot
        return self._slots.get(slot)

    def __iter__(self) -> Iterator[mx.array | None]:
        return iter(self.cache)

    def __setitem__(self, slot: int, value: mx.array | None) -> None:
        if value is None:
            self._slots.pop(slot, None)
        elif value is not self._slots.get(slot):
            # A slice of a chunk would keep the entire chunk alive.
            self._slots[slot] = mx.contiguous(value)

    @property
    def cache(self) -> list[mx.array | None]:
        """All slots in order; mlx-lm's name for them."""
        size = max(self._size, max(self._slots, default=-1) + 1)
        return [self._slots.get(slot) for slot in range(size)]

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The slots that were written, for inspection and evaluation."""
        return tuple(self._slots.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return sum(int(array.nbytes) for array in self._slots.values())

    def empty(self) -> bool:
        """Whether no slot has been written yet."""
        return not self._slots

    def make_mask(self, n: int) -> None:
        """No mask: a step has no padding."""

    def update_window(
        self, slot: int, source: mx.array, width: int, *, lengths: mx.array | None = None
    ) -> mx.array:
        """Keeps the last ``width`` tokens of ``[rows, tokens, ...]``; in mlx-vlm's protocol."""
        assert lengths is None, "a step has no padding"
        tail = source[:, source.shape[1] - width :]
        self[slot] = tail
        return tail

    def update_recurrent(
        self, slot: int, length: int, update: Callable[[mx.array | None, None], Any]
    ) -> tuple[Any, mx.array]:
        """Advances a slot by ``length`` tokens; in mlx-vlm's protocol.

        Args:
            update: returns an output and the next state; called with the state.
        """
        output, state = update(self[slot], None)[:2]
        self[slot] = state
        return output, state

    def advance(self, n: int) -> None:
        """Does nothing: a state has no position."""

    def join(self) -> None:
        """Adds a row of zeros, the state before the first token."""
        for slot, array in self._slots.items():
            row = mx.zeros((1, *array.shape[1:]), array.dtype)
            self._slots[slot] = mx.concatenate([array, row])
        self._rows += 1

    def put(self, row: int, piece: StatePiece | None) -> None:
        """Sets one row's state; None is the state before the first token."""
        new_slots = dict(enumerate(piece.slots)) if piece else {}
        for slot in {*self._slots, *new_slots}:
            old, new = self._slots.get(slot), new_slots.get(slot)
            if old is None and new is not None:
                old = mx.zeros((self._rows, *new.shape[1:]), new.dtype)
            if old is not None:
                new = mx.zeros_like(old[:1]) if new is None else new
                old, new = padded_alike([old, new])
                self._slots[slot] = mx.concatenate([old[:row], new, old[row + 1 :]])

    def rearrange(self, order: Sequence[int]) -> None:
        """Keeps the rows numbered ``order``, in that order."""
        if list(order) != list(range(self._rows)):
            rows = mx.array(list(order), mx.int32)
            self._slots = {slot: array[rows] for slot, array in self._slots.items()}
        self._rows = len(order)

    def get(self, row: int) -> StatePiece | None:
        """One row's state; None before the first write."""
        if not self._slots:
            return None
        return StatePiece(tuple(None if s is None else s[row : row + 1] for s in self.cache))

    def checkpoint(self) -> Slots:
        """The current state of all rows, as arrays that no later step writes to."""
        return _handles(self._slots)

    def reset_rows(self, checkpoints: Mapping[int, Slots], kept: Sequence[int]) -> None:
        """Resets row ``r`` to the state ``checkpoints[kept[r]]``, bit for bit.

        A slot missing in a checkpoint had not been written by then: it is zero for that
        checkpoint's rows, and disappears if no checkpoint has it.
        """
        used = {key: checkpoints[key] for key in dict.fromkeys(kept)}
        names = sorted({slot for slots in used.values() for slot in slots})
        self._slots = _handles({slot: _select_rows(slot, used, kept) for slot in names})

    def reset(self) -> None:
        """Removes all rows and frees the memory."""
        self._slots = {}
        self._rows = 0

    def check_integrity(self, rows: int) -> None:
        """Asserts the invariants between two steps of a batch of ``rows``."""
        assert self._rows == rows, (self._rows, rows)
        for slot, array in self._slots.items():
            assert array.shape[0] == rows, (slot, array.shape, rows)


class _Lent(threading.local):
    """The slot that a model's layer read last, of which cache."""

    layer: weakref.ref[StateLayer] | None = None
    slot = 0


_lent = _Lent()
_zeros: dict[mx.Dtype, mx.array] = {}


def host_state(array: mx.array) -> NDArray[Any] | None:
    """The memory of a slot that a model's layer has just read, for the next state in its place.

    The caller writes at once, on the host, and gives ``array`` back as the layer's next state.
    Where anything else refers to the memory, as snapshots and checkpoints do, it is copied first.

    Returns:
        None if the array is not such a slot, and must not change.
    """
    layer = None if _lent.layer is None else _lent.layer()
    if layer is None or layer._slots.get(_lent.slot) is not array or array.size < 2:
        return None
    first = (0,) * array.ndim
    number = _view(array)[first]
    zero = _zeros.get(array.dtype)
    if zero is None:
        zero = _zeros[array.dtype] = mx.array(0, array.dtype)
    # MLX writes in place only where nothing else refers to the memory. NOTE: what is written must
    # not be read from the array within MLX, which would be a reference.
    array[first] = zero
    memory = _view(array)
    memory[first] = number
    return memory


def _view(array: mx.array) -> NDArray[Any]:
    mx.eval(array)
    return np.array(array, copy=False)


def _handles(slots: Slots) -> dict[int, mx.array]:
    """Handles of their own for the same arrays; see the note in ``StateLayer``."""
    return {slot: copy(array) for slot, array in slots.items()}


def _select_rows(slot: int, checkpoints: Mapping[int, Slots], kept: Sequence[int]) -> mx.array:
    """One slot whose row ``r`` is taken from ``checkpoints[kept[r]]``."""
    like = next(slots[slot] for slots in checkpoints.values() if slot in slots)
    chosen: mx.array | None = None
    for key, slots in checkpoints.items():
        array = slots.get(slot)
        array = mx.zeros_like(like) if array is None else array
        if chosen is None:
            chosen = array
        else:
            rows = mx.array([keep == key for keep in kept]).reshape(-1, *[1] * (array.ndim - 1))
            chosen = mx.where(rows, array, chosen)
    assert chosen is not None
    return chosen


def padded_alike(arrays: Sequence[mx.array]) -> list[mx.array]:
    """All with the same axis 1: a tail that is still growing is padded with zeros in front."""
    if arrays[0].ndim < 2:
        return list(arrays)
    width = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    return [
        x if x.shape[1] == width else mx.pad(x, [(0, 0), (width - x.shape[1], 0), *rest])
        for x in arrays
    ]
