"""Grammars for replies that must or may contain JSON calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from chairlift.api.schemas.fields import checked_size
from chairlift.api.schemas.structured import GrammarRequest
from chairlift.api.schemas.tools import Function
from chairlift.api.text.chat_format import Tag
from chairlift.engine.errors import RequestError
from chairlift.engine.grammar.language import JSON_OPTIONS
from chairlift.engine.grammar.objects import bounded as bounded_objects
from chairlift.engine.grammar.objects import closed
from chairlift.engine.messages import Grammar

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(
    functions: Sequence[Function],
    start: Tag,
    end: Tag,
    *,
    required: bool,
    max_calls: int,
    reply: GrammarRequest | None,
) -> Grammar:
    """A grammar of 1 to ``max_calls`` calls or, unless ``required``, a reply without calls.

    The arguments of each call follow the schema of its function.

    Args:
        functions: the functions that may be called.
        start: the tag before a call.
        end: the tag after a call.
        required: whether the reply must contain a call.
        max_calls: the maximum number of calls.
        reply: the grammar of a reply without calls; None means free text, which may also precede
            the first call.

    Raises:
        RequestError: a function's parameters are not an object, or ``reply`` is neither JSON nor a
            choice.
    """
    one = " | ".join(f"function_{number}" for number in range(len(functions)))
    more = f'("\\n" open call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
    rules = [
        f'call: "\\n" ({one}) "\\n" {_terminal(end)}',
        f"open: {_terminal(start)}",
    ]
    if required:
        rules.append(f"start: open call {more}")
    elif reply is not None:
        rules += [f"start: reply | open call {more}", f"reply: {json_reply(reply)}"]
    elif start.token is not None:
        # Free text cannot contain the tag, because the tag is a single special token.
        rules += [f"start: TEXT | TEXT? open call {more}", "TEXT: /(?s:.*)/"]
    else:
        tag = json.dumps(start.text)
        rules += [
            f"start: TEXT | lead call {more}",
            f"lead[suffix={tag}]: /(?s:.*)/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){_regex(start.text)}(?s:.*)/",
        ]
    for number, function in enumerate(functions):
        head = json.dumps(f'{{"name": "{function.name}", "arguments": ')
        rules.append(f'function_{number}: {head} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {function_schema(function)}")
    return Grammar("lark", "\n".join(rules) + "\n")


def _terminal(tag: Tag) -> str:
    return json.dumps(tag.text) if tag.token is None else f"<[{tag.token}]>"


def _regex(text: str) -> str:
    """A regular expression in Lark's notation for a text of letters, "<", ">", "_" and the like."""
    return "".join(c if c.isalnum() or c in "<>_" else f"\\{c}" for c in text)


def json_reply(request: GrammarRequest) -> str:
    """The text of the rule of a reply in JSON, or of a choice, and further rules behind it.

    Raises:
        RequestError: the request asks for another kind of grammar.
    """
    kind, text = request.grammar.kind, request.grammar.text
    if kind == "json_schema":
        try:
            schema = checked_size(msgspec.json.decode(text, type=dict[str, Any]))
            bounded = bounded_objects(schema)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise RequestError(
                f"{request.param}: no JSON schema: {error}", request.param
            ) from error
        return f"%json {_with_options(bounded, JSON_OPTIONS)}"
    if kind == "json_object":
        return f"%json {_with_options(bounded_objects({'type': 'object'}), JSON_OPTIONS)}"
    if kind == "choice":
        # A terminal is one lexeme: alternatives of a rule would need a parser item each.
        return "CHOICE\nCHOICE: " + " | ".join(map(json.dumps, msgspec.json.decode(text)))
    raise RequestError(
        f"{request.param}: cannot be combined with tools that can be called", request.param
    )


def function_schema(function: Function) -> str:
    """The schema of a function's arguments, as a grammar's rule has it.

    Raises:
        RequestError: they are not an object, or no JSON schema.
    """
    schema = dict(_NO_PARAMETERS if function.parameters is None else function.parameters)
    if schema.setdefault("type", "object") != "object":
        raise RequestError(
            f"tools: the parameters of {function.name!r} must be of type object", "tools"
        )
    # Functions that are not strict may use keywords that a grammar cannot express.
    options = {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "lenient": not function.strict,
    }
    try:
        limited = bounded_objects(closed(schema))
    except ValueError as error:
        raise RequestError(
            f"tools: the parameters of {function.name!r} are no JSON schema: {error}", "tools"
        ) from error
    return _with_options(limited, options)


def _with_options(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
