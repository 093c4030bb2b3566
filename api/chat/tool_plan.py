"""Plans how the calls of a reply are constrained and parsed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from chairlift.api.chat.call_forms import FORMS
from chairlift.api.chat.call_limits import CallLimits
from chairlift.api.chat.calls import JsonCallParser, NativeCallParser
from chairlift.api.chat.choice import CallSyntax
from chairlift.api.chat.harmony_calls import HarmonyCallParser, harmony_grammar
from chairlift.api.chat.tool_grammar import call_grammar
from chairlift.api.schemas.messages import MAX_CALLS
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text.chat_format import JSON_TOOLS, ChatFormat, Tag
from chairlift.api.text.harmony import HarmonyTokens
from chairlift.engine.messages import Grammar

# Mistral's templates accept only call ids of their own length.
_SHORT_IDS = "mistral"
# A small model that must call, or was not trained on a format, may never stop calling.
MAX_CONSTRAINED_CALLS = 16
# A model that is free to call may repeat a call on purpose, for example to roll two dice.
MAX_SAME_CALLS = 3


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """The calls of one request.

    Attributes:
        syntax: the tags around calls, and their parser.
        grammar: makes the model write well-formed calls; None means that the model is
            unconstrained and may call wrongly.
    """

    syntax: CallSyntax
    grammar: Grammar | None


def tool_plan(request: ChatRequest, format: ChatFormat) -> ToolPlan | None:
    """Plans the calls of a request; None if the model can call nothing.

    An unconstrained model calls in its native format. If it must call, or if arguments or reply
    must follow a schema, a grammar constrains it to JSON calls: inside the model's native tags if
    its native format is JSON, else inside those of the JSON form.

    Raises:
        RequestError: a function's parameters cannot be converted to a grammar.
    """
    if not request.callable_tools:
        return None
    if format.harmony is not None:
        return _harmony_plan(request, format.harmony)
    native, choice = format.calls, request.effective_choice
    short_ids = native is not None and native.parser_name == _SHORT_IDS
    strict = any(tool.function.strict for tool in request.callable_tools)
    is_json = native is not None and native.parser_name == JSON_TOOLS
    is_free = choice.mode == "auto" and request.grammar_request is None and not (is_json and strict)
    if native is not None and is_free:
        tools = [tool.for_template() for tool in request.callable_tools]
        native_parser = partial(
            NativeCallParser, native.parse, FORMS.get(native.parser_name), tools, short_ids
        )
        limits = CallLimits(1 if request.calls_once else MAX_CALLS, MAX_SAME_CALLS)
        syntax = CallSyntax(native.start, native.end, native_parser, limits, is_constrained=False)
        return ToolPlan(syntax, None)
    start, end = (native.start, native.end) if native is not None and is_json else format.form
    named = choice.name
    required = choice.mode == "required"
    limits = CallLimits(
        calls=1 if request.calls_once else MAX_CONSTRAINED_CALLS,
        same=1 if required else MAX_SAME_CALLS,
    )
    functions = [t.function for t in request.callable_tools if named in (None, t.function.name)]
    grammar = call_grammar(
        functions,
        start,
        end,
        required=required,
        max_calls=limits.calls,
        reply=request.grammar_request,
    )
    json_parser = partial(JsonCallParser, short_ids)
    return ToolPlan(CallSyntax(start, end, json_parser, limits, is_constrained=True), grammar)


def _harmony_plan(request: ChatRequest, tokens: HarmonyTokens) -> ToolPlan:
    """The plan for gpt-oss's format. A required call is the reply's only one."""
    choice = request.effective_choice
    is_required = choice.mode == "required"
    functions = [
        tool.function
        for tool in request.callable_tools
        if choice.name in (None, tool.function.name)
    ]
    grammar = None
    if is_required or request.grammar_request is not None:
        grammar = harmony_grammar(
            functions, tokens, required=is_required, reply=request.grammar_request
        )
    parser = partial(HarmonyCallParser, frozenset(function.name for function in functions))
    once = request.calls_once or grammar is not None
    limits = CallLimits(1 if once else MAX_CALLS, MAX_SAME_CALLS)
    none = Tag("")
    syntax = CallSyntax(none, none, parser, limits, is_constrained=grammar is not None)
    return ToolPlan(syntax, grammar)
