"""Compiles grammars on threads beside the engine's steps, and caches them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from llguidance import LLMatcher, LLTokenizer

from chairlift.engine.device.priority import give_way
from chairlift.engine.grammar.language import Lexicon, compiled
from chairlift.engine.messages import Grammar

# Limits of the cache: grammars, and characters of their texts. Most compiled grammars take some
# hundred kilobytes; those of long schemas take 300 times the size of their text.
MAX_KEPT = 64
MAX_KEPT_CHARS = 1 << 20
THREADS = 2


class Compiled(NamedTuple):
    """Counts since the last call: cache hits, and the duration of each compilation in seconds."""

    hits: int
    seconds: list[float]


class Compiler:
    """Compiles grammars on two threads, without holding the interpreter lock.

    A grammar that ``Checker`` accepts takes at most 2 s; ``Checker`` also tries two at a time.

    Args:
        lexicon: returns the model's vocabulary; called at once on one of these threads. NOTE:
            building the vocabulary's tree blocks the interpreter, 0.65 s for 150,000 tokens, so
            create the compiler before rows are running.
    """

    def __init__(self, lexicon: Callable[[], Lexicon]) -> None:
        self._threads = ThreadPoolExecutor(
            THREADS, thread_name_prefix="chairlift-grammar", initializer=give_way
        )
        self._tokenizer: Future[LLTokenizer] = self._threads.submit(lambda: lexicon().load())
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._hits = 0
        self._seconds: list[float] = []

    def begin(
        self, grammar: Grammar, done: Callable[[], None], counted: bool = True
    ) -> Future[LLMatcher]:
        """Starts compiling a grammar unless it is cached; returns the future of its matcher.

        Copy the matcher for each row: it has consumed no token of output yet.

        Args:
            done: called from any thread when the matcher is ready or has failed.
            counted: whether a hit counts in ``take_counts``.
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

    def forget(self, grammar: Grammar) -> None:
        """Removes a grammar from the cache, after a row has failed with it.

        Copies of a matcher share its lexer, and after one of them has exceeded the lexer's limits
        the others fail too.
        """
        self._kept.pop(grammar, None)

    @property
    def _chars(self) -> int:
        return sum(len(grammar.text) + len(grammar.begun) for grammar in self._kept)

    def take_counts(self) -> Compiled:
        """Returns and resets the counts."""
        counts = Compiled(self._hits, self._seconds)
        self._hits, self._seconds = 0, []
        return counts

    def _compile(self, grammar: Grammar) -> LLMatcher:
        start = time.monotonic()
        matcher = compiled(grammar, self._tokenizer.result())
        self._seconds.append(time.monotonic() - start)
        return matcher
