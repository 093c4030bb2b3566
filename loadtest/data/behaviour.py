"""Misbehaving clients: some disconnect in the middle of a reply, some read it slowly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chairlift.loadtest.data.workload import WorkloadRequest


def misbehaving(
    requests: Sequence[WorkloadRequest],
    cancel_rate: float,
    slow_rate: float,
    bytes_per_s: float,
    rng: np.random.Generator,
) -> list[WorkloadRequest]:
    """Returns the requests with cancellations and slow readers added at random.

    A request may get both. It is cancelled after a random token that is not its last, so one with a
    single token is never cancelled.

    Args:
        requests: the requests.
        cancel_rate: the fraction that is cancelled, from 0 to 1.
        slow_rate: the fraction that is read slowly, from 0 to 1.
        bytes_per_s: the speed of slow readers.
        rng: the generator.
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
