"""The products of adapters beside those of ``engine.cpu.bf16_linear``, in NumPy.

Where these layers are used, a step is so short that each of MLX's operations counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from chairlift.engine.cpu.gemm import Floats
from chairlift.engine.cpu.views import view
from chairlift.engine.lora.low_rank import LowRank
from chairlift.engine.model.lora_routing import Routing


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
            (member, start, stop)
            for member, (start, stop) in zip(members, pairwise(stops), strict=True)
            if member is not None
        ]
        self._routing = routing
        self._slots: tuple[int, ...] = ()
        self._start, self._stop = 0, stops[-1]
        self._a = self._b = np.zeros((0, 0, 0), np.float32)

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
        for member, _, _ in self._members:
            member.check_tokens(call, len(x))
        if slots != self._slots:
            self._stack(slots)
        groups = call.groups(slots)
        with np.errstate(all="ignore"):  # a row's infinite numbers stay in that row
            narrow = np.matmul(x[groups.tokens], self._a)
            wide = np.matmul(narrow, self._b).reshape(-1, self._b.shape[2])[groups.places]
            columns = product[:, self._start : self._stop]
            if len(groups.rows) == len(x):
                columns += wide
            else:
                columns[groups.rows] += wide

    def _changes(self, slot: int) -> bool:
        return any(slot in member.factors for member, _, _ in self._members)

    def _stack(self, slots: tuple[int, ...]) -> None:
        """Stacks the matrices of some adapters: ``[adapters, inputs, rank]``, and the others.

        Each layer has its own columns of the first, and rows and columns of the second.
        """
        members = [(m, start, stop) for m, start, stop in self._members if m.factors]
        self._start, self._stop = members[0][1], members[-1][2]
        ranks = [max(one.a.shape[1] for one in m.factors.values()) for m, _, _ in members]
        a = np.zeros((len(slots), members[0][0].inputs, sum(ranks)), np.float32)
        b = np.zeros((len(slots), sum(ranks), self._stop - self._start), np.float32)
        at = 0
        for (member, start, stop), rank in zip(members, ranks, strict=True):
            for number, slot in enumerate(slots):
                if (one := member.factors.get(slot)) is not None:
                    own = slice(at, at + one.a.shape[1])
                    a[number, :, own] = view(one.a)
                    b[number, own, start - self._start : stop - self._start] = view(one.b)
            at += rank
        self._a, self._b, self._slots = a, b, slots
