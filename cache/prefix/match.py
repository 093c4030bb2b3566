"""Results of the prefix tree: the cached prefix of a sequence, and evicted nodes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from chairlift.cache.pages.page import PAGE_TOKENS
from chairlift.cache.pages.piece import PagedPiece
from chairlift.cache.path_digest import PathDigest
from chairlift.cache.prefix.node import Node
from chairlift.cache.snapshot import LayerKind, Snapshot, merged


@dataclass(frozen=True, slots=True)
class Match:
    """The cached prefix of a sequence: it can resume after its first ``length`` tokens.

    Its first ``known`` tokens, possibly more than ``length``, are on a path of the tree.
    """

    length: int
    known: int
    kinds: Sequence[LayerKind] = field(repr=False)
    node: Node | None = field(default=None, repr=False)

    def snapshot(self) -> Snapshot:
        """The state of ``[0, length)``: lazy slices that share the tree's memory.

        Raises:
            ValueError: the tree has evicted part of it since the match.
        """
        return merged(self.kinds, self._path())

    def full_pages(self) -> tuple[int, ...]:
        """The numbers of the full pages that a sequence shares if it begins with the snapshot.

        They are those of the full-attention layers; none if the state is not in pages.
        """
        layer = next((i for i, kind in enumerate(self.kinds) if kind == LayerKind(None)), None)
        if layer is None or self.length < PAGE_TOKENS:
            return ()
        first, *later = (snapshot.layers[layer] for snapshot in self._path())
        pieces = [piece for piece in later if isinstance(piece, PagedPiece)]
        if not isinstance(first, PagedPiece) or len(pieces) < len(later):
            return ()
        # None if a part would have to be copied.
        whole = first.followed_by(pieces)
        pages = () if whole is None else whole.run.pages[: self.length // PAGE_TOKENS]
        return tuple(page.number for page in pages)

    def copies_page(self) -> bool:
        """Whether a sequence that begins with the snapshot begins within a page, and so copies it.

        Another sequence may have written the rest of that page.
        """
        if not self.length % PAGE_TOKENS:
            return False
        deepest = next(node for node in self._alive() if node.start < self.length)
        return any(isinstance(piece, PagedPiece) for piece in deepest.snapshot.layers)

    def _path(self) -> list[Snapshot]:
        """The snapshots of ``[0, length)``, which follow each other."""
        nodes = [node for node in self._alive() if node.start < self.length]
        path = [node.snapshot for node in reversed(nodes)]
        if path:
            path[-1] = path[-1].part(path[-1].start, min(path[-1].stop, self.length))
        return path

    def _alive(self) -> Iterator[Node]:
        """The nodes from the deepest upwards. Raises ValueError if the deepest was evicted."""
        if self.node is None:
            return iter(())
        if self.node.parent is None:
            raise ValueError(f"the match of {self.length} tokens is no longer in the tree")
        return self.node.upwards()


@dataclass(frozen=True, slots=True)
class Evicted:
    """An evicted node: its snapshot covers the tokens of ``edge``, which follow the path
    ``before``. Its arrays may not have been evaluated yet.
    """

    edge: array[int]
    before: PathDigest
    snapshot: Snapshot

    @property
    def start(self) -> int:
        """The first position that the snapshot covers."""
        return self.snapshot.start
