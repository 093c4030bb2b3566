"""Compiles a grammar on trial, in a worker process where it can do no harm.

The library is native code: an endless compilation ends only with its process, and a compilation
that overflows the stack (``r0: r1``, ``r1: r2`` and so on, 5,000 times) crashes the process. The
GBNF converter blocks the interpreter for a time that is quadratic in a grammar's blank lines.
"""

from __future__ import annotations

from bisect import bisect

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from chairlift.engine.errors import GrammarError
from chairlift.engine.grammar.language import Lexicon, check, compiled
from chairlift.engine.messages import Grammar

# Masks tried after the compilation. A grammar that compiles may still exceed the limits of a mask,
# mostly of one of the first few.
STEPS = 16


def load(lexicon: Lexicon) -> LLTokenizer:
    """Loads the vocabulary, which the process keeps; see ``Lexicon.load``."""
    return lexicon.load()


def as_lark(text: str) -> str:
    """Converts a grammar from GBNF to Lark's notation.

    Raises:
        GrammarError: it cannot be read.
    """
    try:
        return gbnf_to_lark(text)
    # NOTE: the converter defines no exceptions; it raises any built-in type.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise GrammarError(f"cannot be read as GBNF: {reason}") from error


def walk(tokenizer: LLTokenizer, grammar: Grammar) -> None:
    """Compiles a grammar and consumes some of its possible first tokens.

    Raises:
        GrammarError: the grammar cannot be compiled or followed.
    """
    matcher: LLMatcher = compiled(grammar, tokenizer)
    for _ in range(STEPS):
        mask = matcher.compute_bitmask()
        check(matcher)
        if matcher.is_stopped():
            return
        if not any(mask):
            raise GrammarError("nothing is allowed to come first")
        matcher.consume_token(middle(mask))
        check(matcher)


def middle(mask: bytes) -> int:
    """The middle one of a mask's tokens. Without NumPy, whose import takes as long as a check."""
    allowed = int.from_bytes(mask, "little")

    def up_to(token: int) -> int:
        return (allowed & ((2 << token) - 1)).bit_count()

    return bisect(range(8 * len(mask)), allowed.bit_count() // 2, key=up_to)
