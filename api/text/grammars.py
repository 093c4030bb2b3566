"""Turns a request's structured output fields into a grammar that the engine can compile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from chairlift.api.schemas.structured import GrammarRequest, Structured
from chairlift.engine.errors import GrammarError, RequestError, UnsupportedModel
from chairlift.engine.messages import Grammar

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary

# A rule's head in GBNF and EBNF; Lark's has one colon.
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w.-]*[ \t]*::=", re.MULTILINE)


async def grammar_of(request: Structured, vocabulary: Vocabulary) -> Grammar | None:
    """The grammar that constrains a request's replies, checked to compile; None for free text.

    Raises:
        RequestError: the grammar is invalid, unsupported or too expensive.
        QueueFull: too many other grammars are being checked.
    """
    if request.grammar_request is None:
        return None
    param, grammar = request.grammar_request
    if grammar.kind == "lark" and _GBNF_RULE.search(grammar.text):
        try:
            grammar = Grammar("lark", await vocabulary.grammars.as_lark(grammar.text))
        except GrammarError as error:
            raise RequestError(f"{param}: {error}", param) from error
    await check(GrammarRequest(param, grammar), vocabulary)
    return grammar


async def begun(grammar: Grammar, text: str, vocabulary: Vocabulary) -> Grammar:
    """The grammar of a reply that completes ``text``, the end of the last message.

    Raises:
        RequestError: no reply that the grammar allows begins with it, or ``grammar_of``'s reasons.
        QueueFull: too many other grammars are being checked.
    """
    continuing = msgspec.structs.replace(grammar, begun=text)
    try:
        await vocabulary.grammars.check(continuing)
    except GrammarError as error:
        raise RequestError(
            f"messages: the reply cannot continue the last message: {error}", "messages"
        ) from error
    return continuing


async def check(request: GrammarRequest, vocabulary: Vocabulary) -> None:
    """Raises as ``grammar_of`` does if the grammar cannot be compiled."""
    try:
        await vocabulary.grammars.check(request.grammar)
    except (GrammarError, UnsupportedModel) as error:
        raise RequestError(f"{request.param}: {error}", request.param) from error
