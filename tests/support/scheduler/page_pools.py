"""A model of paged KV caches: every page has a number, and a list of free ones is all there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence

TOKENS = 64


class PagePool:
    """The pages of one kind of layer, and the table (index -> page) of each sequence."""

    def __init__(self, window: int | None, pages: int) -> None:
        self.window = window
        self.free = list(range(1, pages))
        self.references = Counter[int]()
        self.tables: dict[Sequence, dict[int, int]] = {}

    def drop(self, sequence: Sequence) -> None:
        """Gives back all pages of a sequence."""
        self._release(sequence, list(self.tables[sequence]))
        del self.tables[sequence]

    def forget(self, sequence: Sequence, tokens: int) -> None:
        """Gives back the pages that the query at position ``tokens`` does not see."""
        if self.window is not None:
            seen = max(0, tokens - (self.window - 1))
            hidden = [i for i in self.tables[sequence] if (i + 1) * TOKENS <= seen]
            self._release(sequence, hidden)

    def take(self, sequence: Sequence, begin: int, end: int) -> None:
        """Gets pages for the positions ``[begin, end)``, and checks that no other sequence writes.

        Raises:
            AssertionError: no page is free, or another sequence has one of these pages.
        """
        table = self.tables.setdefault(sequence, {})
        for index in range(begin // TOKENS, -(-end // TOKENS)):
            if index not in table:
                assert self.free, f"no page is free for the window {self.window}"
                table[index] = self.free.pop()
                self.references[table[index]] = 1
            assert self.references[table[index]] == 1, "two sequences write a page"

    def fork(self, prompt: Sequence, choices: Iterable[Sequence], tokens: int) -> None:
        """Gives a prompt's full pages to all its choices, and each its own copy of the last."""
        pages = self.tables[prompt]
        for choice in choices:
            self.tables[choice] = {i: page for i, page in pages.items() if i < tokens // TOKENS}
            self.references.update(self.tables[choice].values())
        self.drop(prompt)
        for choice in choices:
            self.take(choice, tokens // TOKENS * TOKENS, tokens)

    def _release(self, sequence: Sequence, indices: Iterable[int]) -> None:
        for index in indices:
            page = self.tables[sequence].pop(index)
            self.references[page] -= 1
            if not self.references[page]:
                self.free.append(page)


class PagePools:
    """The pools of all kinds, used as an engine uses them: it gives back before it takes.

    Attributes:
        shared: the most pages that several sequences have had together.
    """

    def __init__(self, limits: Limits) -> None:
        assert limits.pages is not None
        geometry = limits.geometry
        sizes = {None: geometry.full_bytes, **geometry.window_bytes}
        pages = limits.pages.pages
        assert set(pages) == {window for window, size in sizes.items() if size}
        states = limits.pages.states or 0
        nbytes = sum(count * TOKENS * sizes[window] for window, count in pages.items())
        assert nbytes + states * geometry.row_bytes <= limits.kv_bytes
        self.states = states if geometry.row_bytes else None
        self.pools = [PagePool(window, count) for window, count in pages.items()]
        self.shared = 0

    def launch(
        self,
        rows: Iterable[Sequence],
        joined: dict[Sequence, Sequence],
        begun: dict[Sequence, int],
        chunks: dict[Sequence, tuple[int, int]],
        prompts: Iterable[Sequence],
    ) -> None:
        """Allocates the pages of a step.

        Args:
            rows: the rows that decode.
            joined: the choices whose prompt ended in the step before, and their prompts.
            begun: the prompts that begin, and their cached tokens.
            chunks: for each prompt in the step its first position, and that after the chunk.
            prompts: all prompts in prefill.

        Raises:
            AssertionError: a page is missing, now or for the rest of a prompt that has begun.
        """
        rows, prompts = set(rows), set(prompts)
        for pool in self.pools:
            parents = {joined[row] for row in rows if joined.get(row, row) is not row}
            for sequence in set(pool.tables) - rows - prompts - parents:
                pool.drop(sequence)
            for sequence in rows & set(pool.tables):
                pool.forget(sequence, sequence.num_tokens - 1)
            for parent in parents:
                tokens = parent.num_tokens
                pool.forget(parent, tokens)
                pool.fork(parent, [row for row in rows if joined.get(row) is parent], tokens)
            for sequence in rows:
                pool.take(sequence, sequence.num_tokens - 1, sequence.num_tokens)
            for sequence, tokens in begun.items():
                window = tokens if pool.window is None else pool.window - 1
                pool.take(sequence, max(0, tokens - window), tokens)
            for sequence, (begin, end) in chunks.items():
                pool.forget(sequence, begin)
                pool.take(sequence, begin, end)
            self.shared = max(self.shared, sum(n > 1 for n in pool.references.values()))
            if pool.window is None:
                whole = sum(-(-prompt.num_tokens // TOKENS) for prompt in prompts)
                left = whole - sum(len(pool.tables[prompt]) for prompt in prompts)
                assert left <= len(pool.free), "a prompt that began cannot end"
        if self.states is not None:
            assert len(rows) + len(prompts) <= self.states, "a recurrent state is missing"
