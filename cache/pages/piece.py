"""Tokens of a snapshot that are still in pages, and shared by reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from chairlift.cache.pages.buffers import LayerPages
from chairlift.cache.pages.page import PAGE_TOKENS, page_count
from chairlift.cache.pages.pool import Page, page_of
from chairlift.cache.snapshot import AttentionPiece, KVPiece


class PageRun(NamedTuple):
    """The tokens at the positions ``[start, stop)`` of a sequence, in consecutive pages.

    Attributes:
        pages: from the page of ``start`` to the page of the last token.
        oldest: the oldest position whose token is in the first page; at most ``start``.
    """

    pages: tuple[Page, ...]
    oldest: int
    start: int
    stop: int

    def part(self, start: int, stop: int) -> PageRun:
        """The tokens at ``[start, stop)``, which must be a part of this."""
        if start == stop:
            return PageRun((), start, start, start)
        first = page_of(self.start)
        pages = self.pages[page_of(start) - first : page_count(stop) - first]
        return PageRun(pages, max(self.oldest, PAGE_TOKENS * page_of(start)), start, stop)

    def followed_by(self, later: PageRun) -> PageRun | None:
        """Both runs as one, which needs no copy; None if a page of the later one lacks tokens.

        The run that ends within a page and the one that begins there may have different pages for
        it. The later one's is used, if its sequence had the earlier tokens as well.
        """
        assert self.stop == later.start, (self, later)
        if not self.pages or not later.pages:
            return later if not self.pages else self
        if self.stop % PAGE_TOKENS == 0:
            return PageRun((*self.pages, *later.pages), self.oldest, self.start, later.stop)
        border = PAGE_TOKENS * page_of(self.stop)
        if self.pages[-1] is not later.pages[0] and later.oldest > max(border, self.start):
            return None
        oldest = self.oldest if len(self.pages) > 1 else max(self.oldest, later.oldest)
        return PageRun((*self.pages[:-1], *later.pages), oldest, self.start, later.stop)


class PagedPiece(AttentionPiece):
    """Keys and values of one layer in pages. Snapshots share them; nothing is copied.

    Args:
        layer: the layer's buffers.
        run: where the tokens are; the same object in all layers of a kind.
    """

    __slots__ = ("layer", "run")

    def __init__(self, layer: LayerPages, run: PageRun) -> None:
        self.layer = layer
        self.run = run

    @property
    def tokens(self) -> int:
        return self.run.stop - self.run.start

    @property
    def keys(self) -> mx.array:
        return self.loaded().keys

    @property
    def values(self) -> mx.array:
        return self.loaded().values

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return ()

    @property
    def nbytes(self) -> int:
        return self.tokens * self.layer.page_bytes // PAGE_TOKENS

    def part(self, start: int, stop: int) -> PagedPiece:
        if (start, stop) == (0, self.tokens):
            return self
        offset = self.run.start
        return PagedPiece(self.layer, self.run.part(offset + start, offset + stop))

    def copy(self) -> PagedPiece:
        return self

    def loaded(self) -> KVPiece:
        run = self.run
        return self.layer.get(run.pages, run.start % PAGE_TOKENS, self.tokens)

    def followed_by(self, later: Sequence[AttentionPiece]) -> PagedPiece | None:
        run: PageRun | None = self.run
        for piece in later:
            if not isinstance(piece, PagedPiece) or piece.layer is not self.layer or run is None:
                return None
            run = run.followed_by(piece.run)
        return None if run is None else PagedPiece(self.layer, run)
