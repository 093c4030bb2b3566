"""Converts a client's grammar to llguidance's form and compiles it within limits."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from chairlift.engine.errors import GrammarError, UnsupportedModel
from chairlift.engine.grammar.beginning import fitting_chars
from chairlift.engine.grammar.objects import bounded, unbounded
from chairlift.engine.grammar.special_names import (
    MARK,
    MARK_ESCAPED,
    lark_with_marked_names,
    with_marked_names,
)
from chairlift.engine.grammar.subschemas import Object
from chairlift.engine.messages import Grammar

# Far above any real grammar.
MAX_CHARS = 128 << 10
# Whitespace between two tokens of JSON: none, a blank, or a new line with indentation. If any
# number of blanks were allowed, a model could write them forever.
WHITESPACE = r"[ ]|\n[ ]{0,16}"
# "oneOf" is treated as "anyOf", which is what most libraries that write it mean.
JSON_OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}
# A client may have begun the text with other white space, or with escapes like \u00e9.
BEGUN_JSON_OPTIONS: Any = {
    **JSON_OPTIONS,
    "whitespace_pattern": r"[ \t\r\n]{1,64}",
    "json_allow_general_unicode_escapes": True,
}
# The limits of the parser's items bound one mask to about 50 ms: with the library's defaults
# (50,000 and 2,000) an ambiguous grammar takes 2 s for one mask. Schemas of 400 alternatives stay
# below them. A lexer takes at most 100 MB. Errors quote nothing of the grammar.
LIMITS = LLParserLimits(
    step_max_items=5_000, max_items_in_row=1_000, max_lexer_states=50_000, verbose_errors=False
)
_MAX_REASON_CHARS = 300
# The lines in which the library shows a place of the grammar, which may be one that the server made
# of the client's schemas; a message begins with the place's numbers.
_SHOWN = re.compile(r"^ *(\d+ \|.*|\^+ *)$", re.MULTILINE)


class Lexicon(msgspec.Struct, frozen=True):
    """The vocabulary of a model, in the form that llguidance needs.

    Attributes:
        tokenizer: the JSON of a Hugging Face tokenizer.
        size: the last dimension of the model's logits.
        ends: the ids that end a text.
    """

    tokenizer: str
    size: int
    ends: tuple[int, ...]

    def load(self) -> LLTokenizer:
        """Builds the tree of all tokens' bytes: 0.65 s for 150,000 tokens.

        Raises:
            UnsupportedModel: llguidance does not support this kind of tokenizer.
        """
        try:
            tokenizer = with_marked_names(self.tokenizer, self.ends)
            return LLTokenizer(tokenizer, n_vocab=self.size, eos_token=list(self.ends))
        except Exception as error:  # the library raises nothing more specific
            raise UnsupportedModel(f"structured output: {_short(str(error))}") from error


def has_backend(tokenizer: Any) -> bool:
    """Whether mlx-lm's TokenizerWrapper ``tokenizer`` wraps one of the tokenizers library."""
    return getattr(tokenizer, "backend_tokenizer", None) is not None


def lexicon(tokenizer: Any, size: int) -> Lexicon:
    """The vocabulary of mlx-lm's TokenizerWrapper ``tokenizer``, for logits of ``size``.

    Raises:
        UnsupportedModel: the tokenizer is written in Python, so its tokens' bytes are unknown.
    """
    if not has_backend(tokenizer):
        raise UnsupportedModel("structured output needs a fast tokenizer, which this model lacks")
    text = tokenizer.backend_tokenizer.to_str()
    return Lexicon(text, size, tuple(sorted(tokenizer.eos_token_ids)))


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Compiles a grammar; returns a matcher before the first token of output. Copy it for each row.

    NOTE: the library does not bound all of its work: this may take seconds and gigabytes, or crash
    the process. ``Checker`` rejects such grammars before they get here.

    Raises:
        GrammarError: the grammar is invalid, unsupported, or exceeds the limits; or no text in its
            language has the beginning ``grammar.begun``.
    """
    if len(grammar.text) > MAX_CHARS:
        raise GrammarError(f"longer than {MAX_CHARS} characters")
    try:
        sources = _sources(grammar)
    except ValueError as error:
        raise GrammarError(_short(str(error))) from error
    except RecursionError:
        raise GrammarError("nested too deeply") from None
    begun = grammar.begun
    start = len(begun) - len(begun.lstrip()) if grammar.kind.startswith("json") else 0
    fitting: list[int] = []
    for source in sources:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            continue
        fitting.append(start + fitting_chars(matcher, tokenizer, begun[start:]))
        check(matcher)
        if fitting[-1] == len(begun):
            return matcher
    if not fitting:
        check(matcher)
    raise GrammarError(
        f"the text so far departs from the required form at character {max(fitting) + 1}"
    )


def check(matcher: LLMatcher) -> None:
    """Raises GrammarError if the matcher is in an error state."""
    if matcher.is_error():
        message = matcher.get_error()
        nothing = "NoExtension" in message
        raise GrammarError("there is no text that is it" if nothing else _short(message))


def _sources(grammar: Grammar) -> list[str]:
    """The grammar in the library's form. The first one that compiles is used."""
    options = [JSON_OPTIONS, BEGUN_JSON_OPTIONS] if grammar.begun else [JSON_OPTIONS]
    match grammar.kind:
        case "json_object":
            return _json_sources({"type": "object"}, options)
        case "json_schema":
            return _json_sources(_decoded(grammar.text), options)
        case "regex":
            return [LLMatcher.grammar_from_regex(grammar.text)]
        case "choice":
            choices = msgspec.json.decode(grammar.text, type=list[str])
            # Lark's strings have JSON's syntax, except for surrogates.
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
            # A terminal, whose name is in capitals, is one lexeme: a rule would need a parser item
            # for each choice.
            return [LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(quoted))]
        case "lark":
            return [LLMatcher.grammar_from_lark(lark_with_marked_names(grammar.text))]


def _json_sources(schema: Object | str, options: Sequence[Any]) -> list[str]:
    """A schema with bounded objects, then without: the library cannot bound every object."""
    forms = [bounded(schema), unbounded(schema)] if isinstance(schema, dict) else [schema]
    return [
        LLMatcher.grammar_from_json_schema(form, overrides=override)
        for override in options
        for form in forms
    ]


def _decoded(text: str) -> Object | str:
    """The decoded schema; the text itself if invalid, so that the library reports the error."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return text
    return schema if isinstance(schema, dict) else text


def _short(message: str) -> str:
    """The beginning of the library's message, on one line."""
    # The library escapes some of the marks.
    for hidden in ("<non-verbose/>", MARK, MARK_ESCAPED):
        message = message.replace(hidden, "")
    return " ".join(_SHOWN.sub("", message).split())[:_MAX_REASON_CHARS]
