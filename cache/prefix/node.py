"""The nodes of the prefix tree, and how tokens lead through them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from chairlift.cache.path_digest import PathDigest
from chairlift.cache.snapshot import Snapshot
from chairlift.cache.token_ids import common


@dataclass(eq=False, slots=True)
class Node:
    """One edge and what is held of it. A root has no parent and no edge; a removed node no parent.

    ``windows`` are the newest tokens that all layers of each of the tree's windows hold, ``state``
    is whether all recurrent layers have theirs: both read from the snapshot, for quick matching.
    """

    parent: Node | None
    salt: str
    edge: array[int]
    snapshot: Snapshot
    children: dict[int, Node] = field(default_factory=dict)
    nbytes: int = 0
    windows: tuple[int, ...] = ()
    state: bool = False
    pins: int = 0
    digest: PathDigest | None = None

    @property
    def start(self) -> int:
        """The position at which its edge begins."""
        return self.snapshot.start

    @property
    def stop(self) -> int:
        """The position at which its edge ends."""
        return self.snapshot.stop

    def upwards(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path_digest(self) -> PathDigest:
        """Of all tokens from the root to its end.

        Kept, here and above: to ask for all nodes of a path hashes each edge once.
        """
        node, unknown = self, []
        while node.digest is None and node.parent is not None:
            unknown.append(node)
            node = node.parent
        digest = node.digest = node.digest or PathDigest(node.salt)
        for below in reversed(unknown):
            digest = below.digest = digest.continued(below.edge)
        return digest


class Walk(NamedTuple):
    """The nodes that some tokens lead through, and how many of the tokens they cover."""

    path: list[Node]
    length: int


def walk(root: Node | None, ids: array[int]) -> Walk:
    """As far as the tokens lead; the last node may be left within its edge."""
    path: list[Node] = []
    length = 0
    node = root
    while node is not None and length < len(ids):
        node = node.children.get(ids[length])
        if node is not None:
            path.append(node)
            shared = common(node.edge, ids[length : length + len(node.edge)])
            length += shared
            if shared < len(node.edge):
                break
    return Walk(path, length)
