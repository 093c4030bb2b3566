"""The products of adapters for few tokens on the CPU, in NumPy.

A step of few rows is so short there that each of MLX's operations counts. This evaluates the
layers' inputs, so the model has to be eager; see ``engine.cpu.kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.lora.low_rank import LowRank
from chairlift.engine.model.lora_routing import Groups, Ids, Routing


class _Stack(NamedTuple):
    """The matrices of some adapters.

    Attributes:
        a: ``[adapters, inputs, rank of all members together]``.
        members: for each member its columns of ``a``, and its matrices
            ``[adapters, rank, outputs]``.
    """

    a: Floats
    members: dict[LowRank, tuple[slice, Floats]]


class _Narrow(NamedTuple):
    """The first products of a model call: ``[adapters, longest group, rank of all members]``."""

    groups: Groups
    values: Floats


class HostAddition:
    """Adds the adapters' products to those of layers that read the same input.

    Args:
        members: the layers in order; None for those that no adapter changes.
        stops: the first column of each layer in the group's product, and the end of the last.
    """

    def __init__(
        self, members: Sequence[LowRank | None], stops: Sequence[int], routing: Routing
    ) -> None:
        self._columns = {
            low_rank: slice(*columns)
            for low_rank, columns in zip(members, pairwise(stops), strict=True)
            if low_rank is not None
        }
        self._routing = routing
        self.clear()

    def clear(self) -> None:
        """Forgets the stacked matrices, because the layers' adapters have changed."""
        # Stacked matrices of the last call's adapters; the next call mostly has the same.
        self._slots: tuple[int, ...] = ()
        self._stack = _Stack(np.zeros((0, 0, 0), np.float32), {})
        # The input of the layer that was computed last; the next one may have the same.
        self._input: mx.array | None = None
        self._narrow: _Narrow | None = None

    @property
    def applies(self) -> bool:
        """Whether a token of the current model call has an adapter of these layers."""
        call = self._routing.call
        return call is not None and any(map(self._changes, call.slots))

    def __call__(self, x: Floats, product: Floats) -> None:
        """Adds to ``product``, ``[tokens, outputs of the group]``, what ``x`` gives.

        Raises:
            LowRankError: these are not the tokens of the model call.
        """
        narrow = self._first_products(x)
        if narrow is None:
            return
        for low_rank in self._stack.members:
            rows, wide = self._second_product(low_rank, narrow, len(x))
            product[rows, self._columns[low_rank]] += wide
            low_rank.seen = True

    def added(self, y: mx.array, x: mx.array, low_rank: LowRank) -> mx.array:
        """Adds to ``y``, the output of one layer, what its input ``x`` gives.

        Raises:
            LowRankError: these are not the tokens of the model call.
        """
        tokens = x.size // x.shape[-1]
        if self._routing.call is None:
            return y
        if self._input is not x:
            self._narrow = self._first_products(view(x).reshape(tokens, -1))
            self._input = x
        if self._narrow is None or low_rank not in self._stack.members:
            return y
        low_rank.seen = True
        rows, wide = self._second_product(low_rank, self._narrow, tokens)
        if isinstance(rows, slice):
            return y + mx.array(wide).reshape(y.shape)
        more = np.zeros((tokens, low_rank.outputs), np.float32)
        more[rows] = wide
        return y + mx.array(more).reshape(y.shape)

    def _first_products(self, x: Floats) -> _Narrow | None:
        """The products with the matrices A; None if no token has an adapter of these layers."""
        call = self._routing.call
        slots = () if call is None else tuple(s for s in sorted(call.slots) if self._changes(s))
        if call is None or not slots:
            return None
        for low_rank in self._columns:
            low_rank.check_tokens(call, len(x))
        if slots != self._slots:
            self._slots, self._stack = slots, self._stacked(slots)
        groups = call.groups(slots)
        with np.errstate(all="ignore"):  # a row's infinite numbers stay in that row
            return _Narrow(groups, np.matmul(x[groups.tokens], self._stack.a))

    def _second_product(
        self, low_rank: LowRank, narrow: _Narrow, tokens: int
    ) -> tuple[Ids | slice, Floats]:
        """The rows that have an adapter of a layer's group, and their ``[rows, outputs]``."""
        own, b = self._stack.members[low_rank]
        with np.errstate(all="ignore"):
            wide = np.matmul(narrow.values[:, :, own], b).reshape(-1, low_rank.outputs)
        rows = narrow.groups.rows
        return slice(None) if len(rows) == tokens else rows, wide[narrow.groups.places]

    def _changes(self, slot: int) -> bool:
        return any(slot in low_rank.factors for low_rank in self._columns)

    def _stacked(self, slots: tuple[int, ...]) -> _Stack:
        members = {}
        parts = []
        at = 0
        for low_rank in self._columns:
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
                members[low_rank] = slice(at, at + rank), b
                at += rank
        return _Stack(np.concatenate(parts, axis=1).swapaxes(1, 2), members)
