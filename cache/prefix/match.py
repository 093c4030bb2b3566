"""What the prefix tree hands out: what it holds of a sequence, and what it has dropped."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chairlift.cache.path_digest import PathDigest
from chairlift.cache.prefix.node import Node
from chairlift.cache.snapshot import LayerKind, Snapshot, merged


@dataclass(frozen=True, slots=True)
class Match:
    """The first ``length`` tokens of a sequence, from where it can go on with what is held.

    ``known`` tokens of it, maybe more, lead through the tree.
    """

    length: int
    known: int
    kinds: Sequence[LayerKind] = field(repr=False)
    node: Node | None = field(default=None, repr=False)

    def snapshot(self) -> Snapshot:
        """``[0, length)``, built of slices of what the tree holds; lazy, and not in its own memory.

        Raises:
            ValueError: the tree has dropped some of it since; a match that is held cannot lose any.
        """
        nodes = [node for node in self.alive() if node.start < self.length]
        path = [node.snapshot for node in reversed(nodes)]
        if path:
            path[-1] = path[-1].part(path[-1].start, min(path[-1].stop, self.length))
        return merged(self.kinds, path)

    def alive(self) -> Iterator[Node]:
        """The nodes from the deepest upwards. Raises ValueError if the deepest was dropped."""
        if self.node is None:
            return iter(())
        if self.node.parent is None:
            raise ValueError(f"the match of {self.length} tokens is no longer in the tree")
        return self.node.upwards()


@dataclass(frozen=True, slots=True)
class Evicted:
    """What a node held: the snapshot covers the tokens of ``edge``, which follow those of
    ``before``. Its arrays may not have been evaluated yet.
    """

    edge: array[int]
    before: PathDigest
    snapshot: Snapshot

    @property
    def start(self) -> int:
        """The position from which on the snapshot covers the tokens."""
        return self.snapshot.start
