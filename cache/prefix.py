"""The prefix cache: a radix tree over token ids whose nodes hold ``Snapshot``s.

A node covers the tokens of its edge, behind those of its parent. Positions are counted in tokens
from the root. How far into the tree a prompt reaches is one question; from which of these positions
a sequence can go on is another, and each kind of layer answers it for itself: full attention
anywhere, a window where its newest tokens are held without a gap, a recurrent layer only at the end
of a node that has its state. A match is the last position on which all agree.

Every salt has a tree of its own; one budget and one order of use go over all of them. Nothing here
evaluates an array, and nothing is safe to call from two threads.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from chairlift.cache.snapshot import KVPiece, LayerKind, Snapshot, StatePiece, merged


@dataclass(eq=False, slots=True)
class _Node:
    """One edge and what is held of it. A root has no parent and no edge; a removed node no parent.

    ``windows`` are the newest tokens that all layers of each of the tree's windows hold, ``state``
    is whether all recurrent layers have theirs: both read from the snapshot, for quick matching.
    """

    parent: _Node | None
    salt: str
    edge: array[int]
    snapshot: Snapshot
    children: dict[int, _Node] = field(default_factory=dict)
    nbytes: int = 0
    windows: tuple[int, ...] = ()
    state: bool = False
    holds: int = 0

    @property
    def start(self) -> int:
        return self.snapshot.start

    @property
    def stop(self) -> int:
        return self.snapshot.stop

    def upwards(self) -> Iterator[_Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class _Walk(NamedTuple):
    """The nodes that some tokens lead through, and how many of the tokens they cover."""

    path: list[_Node]
    length: int


class _Plan(NamedTuple):
    """What an insertion comes to: what nodes get, whether the last is cut where the walk ends, and
    the bytes of the walk's idle nodes, which are to stay, and of all that is new.
    """

    offers: dict[_Node, Snapshot]
    splits: bool
    kept: int
    gain: int


class _Span(NamedTuple):
    """The positions from ``first`` to ``last``, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Match:
    """The first ``length`` tokens of a sequence, from where it can go on with what is held.

    ``known`` tokens of it, maybe more, lead through the tree.
    """

    length: int
    known: int
    kinds: Sequence[LayerKind] = field(repr=False)
    node: _Node | None = field(default=None, repr=False)

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

    def alive(self) -> Iterator[_Node]:
        """The nodes from the deepest upwards. Raises ValueError if the deepest was dropped."""
        if self.node is None:
            return iter(())
        if self.node.parent is None:
            raise ValueError(f"the match of {self.length} tokens is no longer in the tree")
        return self.node.upwards()


@dataclass(frozen=True, slots=True)
class Evicted:
    """What a node held: ``tokens`` lead from the root to its end, the snapshot covers the last.

    Its arrays may not have been evaluated yet.
    """

    tokens: tuple[int, ...]
    salt: str
    snapshot: Snapshot

    @property
    def start(self) -> int:
        """The position from which on the snapshot covers the tokens."""
        return self.snapshot.start


class PrefixTree:
    """Snapshots by the tokens that lead to them.

    Args:
        kinds: what each layer keeps.
        budget: bytes held at most; 0 holds nothing.
        on_evict: is given what is dropped for lack of room, once it is out of the tree. It must
            not call the tree.
    """

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        budget: int,
        on_evict: Callable[[Evicted], None] | None = None,
    ) -> None:
        self.kinds = tuple(kinds)
        self.budget = budget
        self.evictions = 0
        self._on_evict = on_evict
        # A window of one token needs nothing held, and is thus none that could hinder.
        self._windows = sorted({kind.window for kind in kinds if kind.window and kind.window > 1})
        self._recurrent = any(kind.recurrent for kind in kinds)
        self._roots: dict[str, _Node] = {}
        # The nodes nobody holds, least recently used first. A child always stands before its
        # parent, so that the first one is a leaf.
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        self._pending: dict[_Node, None] = {}
        self._nodes = self._tokens = self._nbytes = self._held_nbytes = 0

    def __len__(self) -> int:
        return self._nodes

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots held."""
        return self._nbytes

    @property
    def tokens(self) -> int:
        """Tokens held; those that several sequences share count once."""
        return self._tokens

    def match(self, tokens: Sequence[int], most: int | None = None, salt: str = "") -> Match:
        """The longest part of ``tokens[:most]`` from whose end a sequence can go on.

        What is returned counts as just used.
        """
        walk = self._walk(_ids(tokens if most is None else tokens[: max(0, most)]), salt)
        length = self._last_resumable(walk)
        node = next((node for node in reversed(walk.path) if node.start < length), None)
        if node is not None:
            self._touch(node)
        return Match(length, walk.length, self.kinds, node)

    def hold(self, match: Match) -> None:
        """Keeps the match's nodes from being evicted until ``release``; holds are counted.

        Raises:
            ValueError: some of it has been evicted since the match.
        """
        for node in match.alive():
            if not node.holds:
                del self._idle[node]
                self._held_nbytes += node.nbytes
            node.holds += 1

    def release(self, match: Match) -> None:
        """Undoes one ``hold``. What nobody else holds counts as just used."""
        for node in match.alive():
            assert node.holds, "released more often than held"
            node.holds -= 1
            if not node.holds:
                self._idle[node] = None
                self._held_nbytes -= node.nbytes

    def insert(self, tokens: Sequence[int], snapshot: Snapshot, salt: str = "") -> bool:
        """Puts a snapshot of ``[start, len(tokens))`` in, and makes room for it.

        Only what the tree lacks is stored, as lazy copies (see ``take_pending``): the tokens that
        are new, and at positions it has already, recurrent states and older tokens of windows.

        Returns:
            Whether all of it is in the tree now. If not, nothing has changed: ``tokens[:start]``
            is not in the tree, or the path does not fit the budget beside what is held.

        Raises:
            ValueError: the snapshot is not one of these tokens and this tree's layers.
        """
        self._check_fits(tokens, snapshot)
        ids = _ids(tokens)
        walk = self._walk(ids, salt)
        if walk.length < snapshot.start or self.budget <= 0:
            return False
        plan = self._plan(walk, snapshot)
        if self._held_nbytes + plan.kept + plan.gain > self.budget:
            return False
        node = walk.path[-1] if walk.path else None
        if node is not None:
            upper = self._split(node, walk.length) if plan.splits else node
            if node in plan.offers:
                plan.offers[upper] = plan.offers.pop(node)
            self._touch(upper)
            node = upper
        self._make_room(self.budget - plan.gain)
        for filled, offer in plan.offers.items():
            self._put(filled, filled.snapshot.filled(offer))
        if walk.length < len(ids):
            self._grow(node, salt, ids[walk.length :], snapshot.part(walk.length, len(ids)).copy())
        return True

    def evict(self, nbytes: int) -> int:
        """Drops what was used least recently, ``nbytes`` or a little more; returns how many.

        Fewer are dropped only if all the rest is held.
        """
        before = self._nbytes
        self._make_room(before - nbytes)
        return before - self._nbytes

    def clear(self) -> None:
        """Forgets all that is not held, without handing it to ``on_evict``."""
        while self._idle:
            self._remove(next(iter(self._idle)))

    def take_pending(self) -> list[mx.array]:
        """The arrays of the nodes that are new or changed since the last call, to evaluate.

        Until then they keep alive the buffers that they are copied from, and these are copied whole
        when they are written to: evaluate them before the next step writes.
        """
        pending, self._pending = self._pending, {}
        return [item for node in pending for item in node.snapshot.arrays]

    def _check_fits(self, tokens: Sequence[int], snapshot: Snapshot) -> None:
        if snapshot.stop != len(tokens):
            raise ValueError(f"a snapshot up to {snapshot.stop} is not one of {len(tokens)} tokens")
        if len(snapshot.layers) != len(self.kinds):
            raise ValueError(f"{len(snapshot.layers)} layers, but the tree has {len(self.kinds)}")
        for i, (kind, piece) in enumerate(zip(self.kinds, snapshot.layers, strict=True)):
            if isinstance(piece, KVPiece if kind.recurrent else StatePiece):
                raise ValueError(f"layer {i} is {kind}, but has a {type(piece).__name__}")
            held = piece.tokens if isinstance(piece, KVPiece) else 0
            full = kind.window is None and not kind.recurrent
            if full and held < snapshot.stop - snapshot.start:
                raise ValueError(
                    f"layer {i} has {held} tokens of [{snapshot.start}, {snapshot.stop})"
                )

    def _walk(self, ids: array[int], salt: str) -> _Walk:
        path: list[_Node] = []
        length = 0
        node = self._roots.get(salt)
        while node is not None and length < len(ids):
            node = node.children.get(ids[length])
            if node is not None:
                path.append(node)
                common = _common(node.edge, ids[length : length + len(node.edge)])
                length += common
                if common < len(node.edge):
                    break
        return _Walk(path, length)

    def _last_resumable(self, walk: _Walk) -> int:
        """The last position of a walk that all layers can go on from: each has its spans of them,
        and what one of them moves back, the others may move back further.
        """
        spans = [_window_spans(walk.path, i, window) for i, window in enumerate(self._windows)]
        if self._recurrent:
            spans.append([_Span(node.stop, node.stop) for node in walk.path if node.state])
        position, moved = walk.length, True
        while moved:
            back = min((_last_within(layer, position) for layer in spans), default=position)
            position, moved = back, back < position
        return position

    def _plan(self, walk: _Walk, snapshot: Snapshot) -> _Plan:
        offers: dict[_Node, Snapshot] = {}
        gain = kept = 0
        splits = False
        for node in walk.path:
            stop = min(node.stop, walk.length)
            splits = stop < node.stop and walk.length < snapshot.stop
            held = node.snapshot
            if self._may_gain(node, stop, snapshot):
                offer = snapshot.part(max(node.start, snapshot.start), stop)
                part = held.part(node.start, stop)
                filled = part.filled(offer)
                if filled is not part:
                    offers[node] = offer
                    gain += filled.nbytes - part.nbytes
                    splits = stop < node.stop
            if not node.holds:
                kept += held.part(node.start, stop).nbytes if splits else node.nbytes
        if walk.length < snapshot.stop:
            gain += snapshot.part(walk.length, snapshot.stop).nbytes
        return _Plan(offers, splits, kept, gain)

    def _may_gain(self, node: _Node, stop: int, snapshot: Snapshot) -> bool:
        if stop < snapshot.start:
            return False
        span = node.stop - node.start
        return stop == snapshot.stop or any(held < span for held in node.windows)

    def _put(self, node: _Node, snapshot: Snapshot) -> None:
        """Gives a node of the tree another snapshot, with all that is counted about it."""
        grown = snapshot.nbytes - node.nbytes
        node.snapshot = snapshot
        node.nbytes += grown
        self._nbytes += grown
        if node.holds:
            self._held_nbytes += grown
        node.windows = tuple(self._window_tokens(snapshot, window) for window in self._windows)
        node.state = _has_states(self.kinds, snapshot)
        self._pending[node] = None

    def _window_tokens(self, snapshot: Snapshot, window: int) -> int:
        """What all layers of a window hold; as it always is the newest, the fewest that one has."""
        return min(
            piece.tokens if isinstance(piece, KVPiece) else 0
            for kind, piece in zip(self.kinds, snapshot.layers, strict=True)
            if kind.window == window
        )

    def _grow(self, parent: _Node | None, salt: str, edge: array[int], snapshot: Snapshot) -> None:
        """Adds a leaf, and everything above it was used no earlier than it."""
        if parent is None:
            nothing = Snapshot(0, 0, (None,) * len(self.kinds))
            parent = self._roots.setdefault(salt, _Node(None, salt, array(_IDS), nothing))
        leaf = _Node(parent, salt, edge, snapshot)
        parent.children[edge[0]] = leaf
        self._nodes += 1
        self._tokens += len(edge)
        self._idle[leaf] = None
        self._put(leaf, snapshot)
        self._touch(leaf)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cuts a node in two and returns the new upper one; the lower one remains itself.

        So whoever holds the node finds both halves above it.
        """
        first, second = node.snapshot.split(at)
        edge, parent = node.edge, node.parent
        assert parent is not None
        cut = at - node.start
        upper = _Node(parent, node.salt, edge[:cut], first, {edge[cut]: node}, holds=node.holds)
        parent.children[edge[0]] = upper
        node.parent, node.edge = upper, edge[cut:]
        self._nodes += 1
        if not node.holds:
            self._idle[upper] = None
        self._put(upper, first)
        self._put(node, second)
        return upper

    def _touch(self, deepest: _Node) -> None:
        for node in deepest.upwards():
            if not node.holds:
                self._idle.move_to_end(node)

    def _make_room(self, nbytes: int) -> None:
        """Evicts until at most ``nbytes`` are held, or all that is left is in use."""
        while self._nbytes > nbytes and self._idle:
            node = next(iter(self._idle))
            evicted = (
                Evicted(_tokens_to(node), node.salt, node.snapshot) if self._on_evict else None
            )
            self._remove(node)
            self.evictions += 1
            if self._on_evict and evicted:
                self._on_evict(evicted)

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        assert not leaf.holds
        del self._idle[leaf]
        self._pending.pop(leaf, None)
        del parent.children[leaf.edge[0]]
        leaf.parent = None
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        self._nodes -= 1
        self._tokens -= len(leaf.edge)
        self._nbytes -= leaf.nbytes

    def check_integrity(self) -> None:
        """Asserts what must hold between two calls."""
        nodes: list[_Node] = []
        for salt, root in self._roots.items():
            assert root.children, salt
            assert (root.salt, root.parent, root.stop) == (salt, None, 0)
            nodes += root.children.values()
        for node in nodes:
            self._check_node(node)
            nodes += node.children.values()
        assert len(nodes) == self._nodes
        assert sum(len(node.edge) for node in nodes) == self._tokens
        assert sum(node.nbytes for node in nodes) == self._nbytes <= max(0, self.budget)
        assert sum(node.nbytes for node in nodes if node.holds) == self._held_nbytes
        assert {node for node in nodes if not node.holds} == set(self._idle)
        assert set(self._pending) <= set(nodes)
        used = {node: i for i, node in enumerate(self._idle)}
        for node in nodes:
            assert node.holds or all(used[child] < used[node] for child in node.children.values())

    def _check_node(self, node: _Node) -> None:
        assert node.parent is not None
        assert node.parent.children[node.edge[0]] is node
        assert (node.start, node.salt) == (node.parent.stop, node.parent.salt)
        assert node.stop == node.start + len(node.edge) > node.start
        assert node.nbytes == node.snapshot.nbytes
        assert node.state == _has_states(self.kinds, node.snapshot)
        assert node.windows == tuple(self._window_tokens(node.snapshot, w) for w in self._windows)
        assert node.holds >= sum(child.holds for child in node.children.values()), "held from above"
        self._check_fits(range(node.stop), node.snapshot)


# Token ids are kept as C integers: slices of them are copied and compared as memory.
_IDS = "q"


def _ids(tokens: Sequence[int]) -> array[int]:
    return array(_IDS, tokens)


def _tokens_to(node: _Node) -> tuple[int, ...]:
    """All tokens from the root to the node's end."""
    edges = [above.edge for above in node.upwards()]
    return tuple(token for edge in reversed(edges) for token in edge)


def _common(first: array[int], second: array[int]) -> int:
    """How many tokens two sequences share at their start."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _has_states(kinds: Sequence[LayerKind], snapshot: Snapshot) -> bool:
    return all(
        isinstance(piece, StatePiece)
        for kind, piece in zip(kinds, snapshot.layers, strict=True)
        if kind.recurrent
    )


def _window_spans(path: Sequence[_Node], index: int, window: int) -> list[_Span]:
    """The positions that the window's layers can go on from, given the newest of each node."""
    spans: list[_Span] = []
    oldest = newest = 0  # a run of tokens held without a gap
    for node in path:
        held = node.windows[index]
        if held < node.stop - node.start:
            spans.append(_Span(oldest + window - 1 if oldest else 0, newest))
            oldest = node.stop - held
        newest = node.stop
    spans.append(_Span(oldest + window - 1 if oldest else 0, newest))
    return [span for span in spans if span.first <= span.last]


def _last_within(spans: Sequence[_Span], position: int) -> int:
    """The last position in the spans up to the one given; 0, where nothing is needed, if none."""
    index = bisect_right(spans, position, key=lambda span: span.first) - 1
    return min(position, spans[index].last) if index >= 0 else 0
