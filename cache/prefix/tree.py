"""The prefix cache: a radix tree over token ids whose nodes store ``Snapshot``s.

A node covers the tokens of its edge, after those of its parent. Positions are tokens from the
root. A prompt may match the tree further than a sequence can resume: each kind of layer has its
own positions to resume from (``layer_rules``), and a match is the last one that all share.

Every salt has its own tree; all trees share one budget and one least-recently-used order. Nothing
here evaluates an array, and nothing is thread-safe.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import mlx.core as mx

from chairlift.cache.prefix.insertion import insertion
from chairlift.cache.prefix.layer_rules import LayerRules
from chairlift.cache.prefix.match import Evicted, Match
from chairlift.cache.prefix.node import Node, continuation, walk
from chairlift.cache.snapshot import LayerKind, Snapshot
from chairlift.cache.token_ids import ids_of


class PrefixTree:
    """Snapshots by token prefix.

    Args:
        kinds: each layer's kind.
        budget: maximum bytes of all snapshots; 0 stores nothing.
        on_evict: called with each node evicted for lack of room, after its removal. It must not
            call the tree.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        budget: int,
        on_evict: Callable[[Evicted], None] | None = None,
    ) -> None:
        self.budget = budget
        self.evictions = 0
        # Increases whenever the result of a match may change.
        self.version = 0
        self._rules = LayerRules(kinds)
        self._on_evict = on_evict
        self._roots: dict[str, Node] = {}
        # All nodes, least recently used first. A child always precedes its parent, so the first
        # node is a leaf.
        self._by_use: OrderedDict[Node, None] = OrderedDict()
        self._pending: dict[Node, None] = {}
        self._tokens = self._nbytes = 0

    def __len__(self) -> int:
        return len(self._by_use)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Each layer's kind."""
        return self._rules.kinds

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return self._nbytes

    @property
    def tokens(self) -> int:
        """Tokens in the tree; a shared prefix counts once."""
        return self._tokens

    def match(self, tokens: Sequence[int], max_tokens: int | None = None, salt: str = "") -> Match:
        """The longest prefix of ``tokens[:max_tokens]`` from whose end a sequence can resume.

        The matched nodes count as just used.
        """
        ids = ids_of(tokens if max_tokens is None else tokens[: max(0, max_tokens)])
        reached = walk(self._roots.get(salt), ids)
        length = self._rules.last_resumable(reached)
        node = next((node for node in reversed(reached.path) if node.start < length), None)
        if node is not None:
            self._touch(node)
        return Match(length, reached.length, self.kinds, node)

    def continuation(self, tokens: Sequence[int], count: int, salt: str = "") -> list[int]:
        """See ``node.continuation``. No node counts as used."""
        return continuation(self._roots.get(salt), ids_of(tokens), count)

    def insert(self, tokens: Sequence[int], snapshot: Snapshot, salt: str = "") -> bool:
        """Inserts a snapshot of ``[start, len(tokens))``, evicting other nodes to make room.

        Only what the tree lacks is stored, as lazy copies (see ``take_pending``): new tokens, and
        recurrent states and older window tokens for positions that the tree has already.

        Returns:
            Whether all of it is in the tree now. If not, nothing has changed: ``tokens[:start]``
            is not in the tree, or the path does not fit the budget.

        Raises:
            ValueError: the snapshot does not fit these tokens and this tree's layers.
        """
        self._rules.check_fits(tokens, snapshot)
        ids = ids_of(tokens)
        reached = walk(self._roots.get(salt), ids)
        if reached.length < snapshot.start or self.budget <= 0:
            return False
        plan = insertion(reached, snapshot)
        if plan.kept + plan.gain > self.budget:
            return False
        node = reached.path[-1] if reached.path else None
        if node is not None:
            upper = self._split(node, reached.length) if plan.splits else node
            if node in plan.offers:
                plan.offers[upper] = plan.offers.pop(node)
            self._touch(upper)
            node = upper
        self._make_room(self.budget - plan.gain)
        for filled, offer in plan.offers.items():
            self._put(filled, filled.snapshot.filled(offer))
        if reached.length < len(ids):
            new = snapshot.part(reached.length, len(ids)).copy()
            self._grow(node, salt, ids[reached.length :], new)
        return True

    def evict(self, nbytes: int) -> int:
        """Evicts the least recently used nodes, at least ``nbytes`` if the tree has as many.

        Returns:
            The evicted bytes.
        """
        before = self._nbytes
        self._make_room(before - nbytes)
        return before - self._nbytes

    def clear(self) -> None:
        """Removes all nodes without calling ``on_evict``."""
        while self._by_use:
            self._remove(next(iter(self._by_use)))

    def take_pending(self) -> list[mx.array]:
        """The arrays of nodes that are new or changed since the last call, for evaluation.

        Until they are evaluated they reference the buffers that they are copied from, and MLX
        copies a referenced buffer when it is written: evaluate them before the next step writes.
        """
        pending, self._pending = self._pending, {}
        return [item for node in pending for item in node.snapshot.arrays]

    def _put(self, node: Node, snapshot: Snapshot) -> None:
        """Replaces a node's snapshot and updates everything derived from it."""
        self.version += 1
        grown = snapshot.nbytes - node.nbytes
        node.snapshot = snapshot
        node.nbytes += grown
        self._nbytes += grown
        node.windows = self._rules.windows_of(snapshot)
        node.state = self._rules.has_states(snapshot)
        self._pending[node] = None

    def _grow(self, parent: Node | None, salt: str, edge: array[int], snapshot: Snapshot) -> None:
        """Adds a leaf and marks it and its ancestors as just used."""
        if parent is None:
            empty = Snapshot(0, 0, (None,) * len(self.kinds))
            parent = self._roots.setdefault(salt, Node(None, salt, ids_of(()), empty))
        leaf = Node(parent, salt, edge, snapshot)
        parent.children[edge[0]] = leaf
        self._tokens += len(edge)
        self._by_use[leaf] = None
        self._put(leaf, snapshot)
        self._touch(leaf)

    def _split(self, node: Node, at: int) -> Node:
        """Splits a node and returns the new upper one; the lower one stays the same object.

        So a match that refers to the node still finds both halves going upwards.
        """
        first, second = node.snapshot.split(at)
        edge, parent = node.edge, node.parent
        assert parent is not None
        cut = at - node.start
        upper = Node(parent, node.salt, edge[:cut], first, {edge[cut]: node})
        parent.children[edge[0]] = upper
        node.parent, node.edge = upper, edge[cut:]
        self._by_use[upper] = None
        self._put(upper, first)
        self._put(node, second)
        return upper

    def _touch(self, deepest: Node) -> None:
        for node in deepest.upwards():
            self._by_use.move_to_end(node)

    def _make_room(self, nbytes: int) -> None:
        """Evicts until at most ``nbytes`` remain."""
        while self._nbytes > nbytes and self._by_use:
            node = next(iter(self._by_use))
            parent = node.parent
            assert parent is not None
            evicted = None
            if self._on_evict:
                evicted = Evicted(node.edge, parent.path_digest(), node.snapshot)
            self._remove(node)
            self.evictions += 1
            if self._on_evict and evicted:
                self._on_evict(evicted)

    def _remove(self, leaf: Node) -> None:
        self.version += 1
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del self._by_use[leaf]
        self._pending.pop(leaf, None)
        del parent.children[leaf.edge[0]]
        leaf.parent = None
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._tokens -= len(leaf.edge)
        self._nbytes -= leaf.nbytes

    def check_integrity(self) -> None:
        """Asserts the invariants between two calls."""
        nodes: list[Node] = []
        for salt, root in self._roots.items():
            assert root.children, salt
            assert (root.salt, root.parent, root.stop) == (salt, None, 0)
            nodes += root.children.values()
        for node in nodes:
            self._check_node(node)
            nodes += node.children.values()
        assert sum(len(node.edge) for node in nodes) == self._tokens
        assert sum(node.nbytes for node in nodes) == self._nbytes <= max(0, self.budget)
        assert len(nodes) == len(self._by_use)
        assert set(nodes) == set(self._by_use)
        assert set(self._pending) <= set(nodes)
        used = {node: i for i, node in enumerate(self._by_use)}
        for node in nodes:
            assert all(used[child] < used[node] for child in node.children.values())

    def _check_node(self, node: Node) -> None:
        assert node.parent is not None
        assert node.parent.children[node.edge[0]] is node
        assert (node.start, node.salt) == (node.parent.stop, node.parent.salt)
        assert node.stop == node.start + len(node.edge) > node.start
        assert node.nbytes == node.snapshot.nbytes
        assert node.state == self._rules.has_states(node.snapshot)
        assert node.windows == self._rules.windows_of(node.snapshot)

        self._rules.check_fits(range(node.stop), node.snapshot)
