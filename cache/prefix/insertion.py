"""Plans an insertion into the prefix tree before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.cache.prefix.node import Node, Walk
from chairlift.cache.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Insertion:
    """A planned insertion.

    Attributes:
        offers: for existing nodes, the snapshots that they are completed from.
        splits: whether the last node is split where the walk ends.
        kept: bytes of the walk's nodes, which must stay.
        gain: bytes of everything new.
    """

    offers: dict[Node, Snapshot]
    splits: bool
    kept: int
    gain: int


def insertion(walk: Walk, snapshot: Snapshot) -> Insertion:
    """Plans to insert a snapshot whose tokens lead through ``walk``, and possibly further."""
    offers: dict[Node, Snapshot] = {}
    gain = kept = 0
    splits = False
    for node in walk.path:
        stop = min(node.stop, walk.length)
        splits = stop < node.stop and walk.length < snapshot.stop
        old = node.snapshot
        if _may_gain(node, stop, snapshot):
            offer = snapshot.part(max(node.start, snapshot.start), stop)
            part = old.part(node.start, stop)
            filled = part.filled(offer)
            if filled is not part:
                offers[node] = offer
                gain += filled.nbytes - part.nbytes
                splits = stop < node.stop
        kept += old.part(node.start, stop).nbytes if splits else node.nbytes
    if walk.length < snapshot.stop:
        gain += snapshot.part(walk.length, snapshot.stop).nbytes
    return Insertion(offers, splits, kept, gain)


def _may_gain(node: Node, stop: int, snapshot: Snapshot) -> bool:
    if stop < snapshot.start:
        return False
    length = node.stop - node.start
    return stop == snapshot.stop or any(tokens < length for tokens in node.windows)
