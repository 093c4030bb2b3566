"""Misbehaving clients: some disconnect in the middle of a reply, some read it slowly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chairlift.loadtest.data.workload import Request


def misbehaving(
    requests: Sequence[Request],
    cancel_rate: float,
    slow_rate: float,
    bytes_per_s: float,
    rng: np.random.Generator,
) -> list[Request]:
    """The requests, of which ``cancel_rate`` are cancelled and ``slow_rate`` read slowly.

    Both are fractions from 0 to 1, and a request may be in both. A request is cancelled after a
    random token that is not its last, so one with a single token is never cancelled.
    """
    leaving, slow = (
        frozenset(rng.permutation(len(requests))[: round(rate * len(requests))].tolist())
        for rate in (cancel_rate, slow_rate)
    )
    left_at = rng.random(len(requests))
    return [
        replace(
            request,
            cancel_after=1 + int(left_at[i] * (request.output_len - 1))
            if i in leaving and request.output_len > 1
            else None,
            bytes_per_s=bytes_per_s if i in slow else None,
        )
        for i, request in enumerate(requests)
    ]
