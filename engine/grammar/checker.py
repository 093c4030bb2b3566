"""Checks in a worker process whether a grammar can be compiled."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from chairlift.engine.errors import GrammarError, UnsupportedModel
from chairlift.engine.grammar.language import MAX_CHARS, Lexicon
from chairlift.engine.grammar.trial import as_lark, load, walk
from chairlift.engine.messages import Grammar
from chairlift.engine.workers.job import Fixture, Job, TooExpensive
from chairlift.engine.workers.pool import Workers
from chairlift.engine.workers.shared_calls import SharedCalls

# Maximum number of remembered results.
MAX_KNOWN = 1024


class Checker:
    """Tries grammars in ``workers`` and remembers the results.

    Requests that come while their grammar is being tried or read wait for the same result.

    Args:
        lexicon: returns the model's vocabulary; called in another thread, once per process.
    """

    def __init__(self, lexicon: Callable[[], Lexicon], workers: Workers) -> None:
        self._workers = workers
        self._vocabulary = Fixture(lambda: (load, (lexicon(),)))
        # The error of a grammar by its hash; empty if it is valid.
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._shared = SharedCalls[str]()
        # The reason why the vocabulary supports no grammar, once it is known.
        self._unsupported = ""

    async def check(self, grammar: Grammar) -> None:
        """Returns if rows can be constrained by the grammar.

        Raises:
            GrammarError: it is invalid, unsupported, or too expensive.
            UnsupportedModel: the model's vocabulary supports no grammar.
            QueueFull: too many other grammars wait to be tried.
        """
        _check_length(grammar.text)
        if self._unsupported:
            raise UnsupportedModel(self._unsupported)
        key = hashlib.sha256(msgspec.json.encode(grammar)).digest()
        if key not in self._known:
            problem = await self._shared.call(key, lambda: self._try(grammar))
            self._known[key] = problem
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if problem := self._known[key]:
            raise GrammarError(problem)

    async def as_lark(self, text: str) -> str:
        """Converts a grammar from GBNF to Lark's notation.

        Raises:
            GrammarError: it cannot be read, or takes too long to read.
            QueueFull: too many others wait to be read.
        """
        _check_length(text)
        try:
            lark = await self._shared.call(text, lambda: self._workers.run(Job(as_lark, (text,))))
        except TooExpensive as error:
            raise GrammarError(f"{error} to read") from error
        _check_length(lark)
        return lark

    async def _try(self, grammar: Grammar) -> str:
        """The grammar's error, empty if it is valid."""
        try:
            await self._workers.run(Job(walk, (grammar,), fixture=self._vocabulary))
        except TooExpensive as error:
            # Not remembered, because it may be fast enough when the machine is less busy.
            raise GrammarError(f"{error} to compile") from error
        except GrammarError as error:
            return str(error)
        except UnsupportedModel as error:
            self._unsupported = str(error)
            raise
        return ""


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise GrammarError(f"longer than {MAX_CHARS} characters")
