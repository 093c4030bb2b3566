"""What an insertion into the prefix tree comes to, before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.cache.prefix.node import Node, Walk
from chairlift.cache.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Insertion:
    """What nodes get, whether the last is cut where the walk ends, and the bytes of the walk's idle
    nodes, which are to stay (``kept``), and of all that is new (``gain``).
    """

    offers: dict[Node, Snapshot]
    splits: bool
    kept: int
    gain: int


def insertion(walk: Walk, snapshot: Snapshot) -> Insertion:
    """Of a snapshot whose tokens lead through the nodes of ``walk``, and maybe further."""
    offers: dict[Node, Snapshot] = {}
    gain = kept = 0
    splits = False
    for node in walk.path:
        stop = min(node.stop, walk.length)
        splits = stop < node.stop and walk.length < snapshot.stop
        held = node.snapshot
        if _may_gain(node, stop, snapshot):
            offer = snapshot.part(max(node.start, snapshot.start), stop)
            part = held.part(node.start, stop)
            filled = part.filled(offer)
            if filled is not part:
                offers[node] = offer
                gain += filled.nbytes - part.nbytes
                splits = stop < node.stop
        if not node.pins:
            kept += held.part(node.start, stop).nbytes if splits else node.nbytes
    if walk.length < snapshot.stop:
        gain += snapshot.part(walk.length, snapshot.stop).nbytes
    return Insertion(offers, splits, kept, gain)


def _may_gain(node: Node, stop: int, snapshot: Snapshot) -> bool:
    if stop < snapshot.start:
        return False
    span = node.stop - node.start
    return stop == snapshot.stop or any(held < span for held in node.windows)
