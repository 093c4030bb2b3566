"""Grammars as the engine uses them: compiled beside its steps, and kept."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from chairlift.engine.grammar.language import Lexicon, compiled
from chairlift.engine.messages import Grammar

# Most compiled ones take some hundred kilobytes; those of long schemas 300 times their text.
MAX_KEPT = 64
MAX_KEPT_CHARS = 1 << 20
THREADS = 2


class Compiled(NamedTuple):
    """Since they were last asked for: how many grammars were there already, and the seconds that
    the others took.
    """

    hits: int
    seconds: list[float]


class Compiler:
    """Compiles grammars on two threads, which do not hold the interpreter meanwhile.

    What ``Checker`` lets through takes 2 s at most; two are compiled at a time, as it tries two.

    Args:
        lexicon: the model's vocabulary; asked for on that thread, at once. NOTE: to build its tree
            holds the interpreter, for half a second of 150,000 tokens: not while rows are running.
    """

    def __init__(self, lexicon: Callable[[], Lexicon]) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="chairlift-grammar")
        self._tokenizer: Future[LLTokenizer] = self._threads.submit(lambda: lexicon().load())
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._hits = 0
        self._seconds: list[float] = []

    def begin(
        self, grammar: Grammar, done: Callable[[], None], counted: bool = True
    ) -> Future[LLMatcher]:
        """The grammar's matcher, before the first token, to be copied; there now or soon.

        ``done`` is called, from any thread, when it is there or has failed. Unless ``counted``, it
        is no hit.
        """
        future = self._kept.get(grammar)
        if future is None:
            future = self._kept[grammar] = self._threads.submit(self._compile, grammar)
            while len(self._kept) > MAX_KEPT or self._chars > MAX_KEPT_CHARS:
                self._kept.popitem(last=False)
        else:
            self._hits += counted
            self._kept.move_to_end(grammar)
        future.add_done_callback(lambda _: done())
        return future

    @property
    def _chars(self) -> int:
        return sum(len(grammar.text) for grammar in self._kept)

    def take_counts(self) -> Compiled:
        """What there is to tell since the last call."""
        counts = Compiled(self._hits, self._seconds)
        self._hits, self._seconds = 0, []
        return counts

    def _compile(self, grammar: Grammar) -> LLMatcher:
        start = time.monotonic()
        matcher = compiled(grammar, self._tokenizer.result())
        self._seconds.append(time.monotonic() - start)
        return matcher
