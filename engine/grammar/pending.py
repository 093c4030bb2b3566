"""The grammars of the engine's requests, compiled or still awaited."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from llguidance import LLMatcher

from chairlift.engine.grammar.compiler import Compiled, Compiler
from chairlift.engine.messages import Grammar, Submit
from chairlift.scheduler.sequence import Sequence


class Grammars:
    """Grammars by request, from its arrival to its end.

    Args:
        compiler: None if the engine has no tokenizer; then no request can have a grammar.
    """

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._matchers: dict[str, Future[LLMatcher]] = {}
        self._awaited: dict[str, Future[LLMatcher]] = {}
        self._wake: Callable[[], None] = lambda: None

    @property
    def due(self) -> bool:
        """Whether ``take_done`` has finished grammars to collect."""
        return any(future.done() for future in self._awaited.values())

    def on_due(self, wake: Callable[[], None]) -> None:
        """Sets the function that is called, from other threads, when ``due`` may be true."""
        self._wake = wake

    def begin(self, request: Submit) -> None:
        """Starts compiling a request's grammar, if it has one.

        Raises:
            ValueError: this engine has no tokenizer.
        """
        grammar = request.params.grammar
        if grammar is None:
            return
        if self._compiler is None:
            raise ValueError("a grammar needs an engine with a tokenizer")
        future = self._compiler.begin(grammar, lambda: self._wake(), not request.replay)
        self._matchers[request.request_id] = self._awaited[request.request_id] = future

    def awaited(self, sequence: Sequence) -> bool:
        """Whether a sequence's grammar is still being compiled."""
        return sequence.request_id in self._awaited

    def take_done(self) -> dict[str, BaseException | None]:
        """Collects finished grammars: the error of each, or None, by request."""
        done = [request for request, future in self._awaited.items() if future.done()]
        return {request: self._awaited.pop(request).exception() for request in done}

    def matcher(self, sequence: Sequence) -> LLMatcher | None:
        """A copy of the matcher for one row, before the first token; None if unconstrained."""
        future = self._matchers.get(sequence.request_id)
        return None if future is None else future.result().deep_copy()

    def forget(self, grammar: Grammar) -> None:
        """See ``Compiler.forget``."""
        if self._compiler is not None:
            self._compiler.forget(grammar)

    def take_counts(self) -> Compiled:
        """See ``Compiler.take_counts``."""
        return Compiled(0, []) if self._compiler is None else self._compiler.take_counts()

    def drop(self, request_id: str) -> None:
        """Removes a request that has ended."""
        self._matchers.pop(request_id, None)
        self._awaited.pop(request_id, None)
