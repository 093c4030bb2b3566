"""The nodes of the prefix tree, and the walk along the nodes that match some tokens."""

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
    """One edge and its snapshot. A root has no parent and no edge; a removed node has no parent.

    Attributes:
        parent: the node above.
        salt: the salt of its tree.
        edge: the tokens that it covers.
        snapshot: the state of these tokens.
        children: the nodes below, by the first token of their edge.
        nbytes: bytes of the snapshot.
        windows: for each window, the number of newest tokens that all its layers have. Like
            ``state`` it is derived from the snapshot, for fast matching.
        state: whether all recurrent layers have their state.
        digest: the result of ``path_digest``, once it is known.
    """

    parent: Node | None
    salt: str
    edge: array[int]
    snapshot: Snapshot
    children: dict[int, Node] = field(default_factory=dict)
    nbytes: int = 0
    windows: tuple[int, ...] = ()
    state: bool = False

    digest: PathDigest | None = None

    @property
    def start(self) -> int:
        """The position where its edge begins."""
        return self.snapshot.start

    @property
    def stop(self) -> int:
        """The position where its edge ends."""
        return self.snapshot.stop

    def upwards(self) -> Iterator[Node]:
        """This node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def path_digest(self) -> PathDigest:
        """The digest of all tokens from the root to its end.

        Cached here and in the ancestors, so that the digests of all nodes of a path hash each edge
        only once.
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
    """The nodes on the path of some tokens, and the number of tokens that they match."""

    path: list[Node]
    length: int


def walk(root: Node | None, ids: array[int]) -> Walk:
    """Follows the tokens as far as possible; the last node may match only partly."""
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


def continuation(root: Node | None, ids: array[int], count: int) -> list[int]:
    """At most ``count`` tokens that follow ``ids`` in the tree, of the newest of several branches;
    empty if the tree does not have all of ``ids``, or nothing behind them.
    """
    reached = walk(root, ids)
    if root is None or reached.length < len(ids):
        return []
    node = reached.path[-1] if reached.path else root
    begin = len(ids) - node.start
    found = list(node.edge[begin : begin + count])
    while len(found) < count and node.children:
        node = next(reversed(node.children.values()))
        found += node.edge[: count - len(found)]
    return found
