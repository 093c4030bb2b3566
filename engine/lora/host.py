"""The products of adapters beside those of ``engine.cpu.bf16_linear``, in NumPy.

Where these layers are used, a step is so short that each of MLX's operations counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.lora.low_rank import LowRank
from chairlift.engine.model.lora_routing import Routing


class _Member(NamedTuple):
    """A layer of a group that some adapter changes, and its columns in the group's product."""

    low_rank: LowRank
    columns: slice


class _Stack(NamedTuple):
    """The matrices of some adapters.

    Attributes:
        a: ``[adapters, inputs, rank of all members together]``.
        members: for each member its columns of ``a``, its columns of the product, and its matrices
            ``[adapters, rank, outputs]``.
    """

    a: Floats
    members: list[tuple[slice, slice, Floats]]


class HostAddition:
    """Adds the adapters' products to those of layers that read the same input.

    Args:
        members: the layers in order; None for those that no adapter changes.
        stops: the first column of each layer in the group's product, and the end of the last.
    """

    def __init__(
        self, members: Sequence[LowRank | None], stops: Sequence[int], routing: Routing
    ) -> None:
        self._members = [
            _Member(low_rank, slice(*columns))
            for low_rank, columns in zip(members, pairwise(stops), strict=True)
            if low_rank is not None
        ]
        self._routing = routing
        # Of the adapters of the last call, which are mostly those of the next one.
        self._slots: tuple[int, ...] = ()
        self._stack = _Stack(np.zeros((0, 0, 0), np.float32), [])

    def clear(self) -> None:
        """Forgets the stacked matrices, because the layers' adapters have changed."""
        self._slots = ()

    def __call__(self, x: Floats, product: Floats) -> None:
        """Adds to ``product``, ``[tokens, outputs of the group]``, what ``x`` gives.

        Raises:
            LowRankError: these are not the tokens of the model call.
        """
        call = self._routing.call
        if call is None:
            return
        slots = tuple(slot for slot in sorted(call.slots) if self._changes(slot))
        if not slots:
            return
        for member in self._members:
            member.low_rank.check_tokens(call, len(x))
        if slots != self._slots:
            self._slots, self._stack = slots, self._stacked(slots)
        groups = call.groups(slots)
        rows = slice(None) if len(groups.rows) == len(x) else groups.rows
        with np.errstate(all="ignore"):  # a row's infinite numbers stay in that row
            narrow = np.matmul(x[groups.tokens], self._stack.a)
            for own, columns, b in self._stack.members:
                wide = np.matmul(narrow[:, :, own], b).reshape(-1, b.shape[2])
                product[rows, columns] += wide[groups.places]

    def _changes(self, slot: int) -> bool:
        return any(slot in member.low_rank.factors for member in self._members)

    def _stacked(self, slots: tuple[int, ...]) -> _Stack:
        members = []
        parts = []
        at = 0
        for low_rank, columns in self._members:
            factors = low_rank.factors
            rank = max((one.a.shape[1] for one in factors.values()), default=0)
            # The BLAS reads narrow matrices faster by their columns.
            a = np.zeros((len(slots), rank, low_rank.inputs), np.float32)
            b = np.zeros((len(slots), rank, low_rank.outputs), np.float32)
            for number, slot in enumerate(slots):
                if (one := factors.get(slot)) is not None:
                    a[number, : one.a.shape[1]] = view(one.a).T
                    b[number, : one.a.shape[1]] = view(one.b)
            if rank:
                parts.append(a)
                members.append((slice(at, at + rank), columns, b))
                at += rank
        return _Stack(np.concatenate(parts, axis=1).swapaxes(1, 2), members)
