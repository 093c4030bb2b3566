"""The constraint on one row's next token: first by its thought, then by its grammar."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from copy import copy

from llguidance import LLMatcher

from chairlift.engine.grammar.language import check
from chairlift.engine.grammar.thought import Thought
from chairlift.engine.messages import SamplingParams
from chairlift.engine.sampling.masks import Bits, allow, forbid


class Constraint:
    """One row's constraint after the tokens taken so far.

    Args:
        matcher: the row's own matcher, before the first token; None if there is no grammar.
    """

    def __init__(self, params: SamplingParams, matcher: LLMatcher | None) -> None:
        self._matcher = matcher
        # A text that the prompt has begun may be complete before the first token.
        self._has_output = False
        self._ends = params.stop_token_ids
        self._thought = None if params.thinking is None else Thought(params.thinking)

    @property
    def complete(self) -> bool:
        """Whether no further token can follow the last one.

        If none has been taken, the next one is a token that ends the text.
        """
        return self._has_output and self.matcher is not None and self.matcher.is_stopped()

    @property
    def matcher(self) -> LLMatcher | None:
        """The matcher of the next token; None during the thought, or without a grammar."""
        thought = self._thought
        return self._matcher if thought is None or thought.over or thought.opening else None

    def take(self, tokens: Seq[int]) -> None:
        """Feeds the next tokens of the output to thought and grammar.

        Raises:
            GrammarError: one of them is not allowed, or the grammar exceeds its limits.
        """
        for token in tokens:
            self._has_output = True
            thought = self._thought
            if thought is not None and not thought.over and thought.take(token):
                continue
            if self._matcher is not None and not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                check(self._matcher)

    @property
    def forced(self) -> list[int]:
        """The next tokens, if the grammar leaves only one way to continue; else empty."""
        matcher = self.matcher
        if matcher is None or matcher.is_stopped():
            return []
        tokens: list[int] = matcher.deep_copy().compute_ff_tokens()
        return tokens

    @contextmanager
    def trying(self) -> Iterator[None]:
        """A context in which tokens are taken, and given back at its end.

        NOTE: the matcher is copied. llguidance's ``rollback`` does not give back what rules with
        ``max_tokens`` have counted.
        """
        thought, matcher = self._thought, self._matcher
        self._thought = copy(thought)
        self._matcher = None if matcher is None else matcher.deep_copy()
        try:
            yield
        finally:
            self._thought, self._matcher = thought, matcher

    def apply_thought(self, bits: Bits) -> None:
        """Applies the thought to a mask ``[words]``, filled by ``matcher`` or with all bits set."""
        thought = self._thought
        if thought is None or thought.over:
            return
        if thought.start is not None:
            allow(bits, thought.start)
        elif (forced := thought.forced) is not None:
            bits[:] = 0
            allow(bits, forced)
        elif self._matcher is not None:
            for token in self._ends:  # the text may not end before the grammar's part
                forbid(bits, token)
