"""How a request's tools reach the model, and how its calls come back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from chairlift.api.chat.call_limits import CallLimits
from chairlift.api.chat.calls import ParsedCalls, StreamedCalls
from chairlift.api.chat.choice import CallReading
from chairlift.api.chat.tool_grammar import call_grammar
from chairlift.api.schemas.messages import MAX_CALLS
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text.chat_format import JSON_TOOLS, ChatFormat
from chairlift.engine.messages import Grammar

# Its templates take no call's id of another length than theirs.
_SHORT_IDS = "mistral"
# A small model that must call, or has been taught no format, may not stop by itself.
MAX_HELD_CALLS = 16
# A model that is free to call may mean to repeat a call: two dice are two calls of one function.
MAX_SAME_CALLS = 3


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """``reading`` is how calls are read; ``grammar`` what holds the model to them, None if it is
    free to call, and to call wrongly.
    """

    reading: CallReading
    grammar: Grammar | None


def tool_plan(request: ChatRequest, format: ChatFormat) -> ToolPlan | None:
    """None if nothing can be called.

    A model calls in its own format as long as it is free to. That it must, or what its arguments
    or its reply have to be, a grammar ensures; and that is of JSON, in the model's own tags if they
    hold JSON, else in ours.

    Raises:
        RequestError: a function's parameters are nothing that a grammar can be made of.
    """
    if not request.callable_tools:
        return None
    own, choosing = format.calls, request.choosing
    short_ids = own is not None and own.parser_name == _SHORT_IDS
    strict = any(tool.function.strict for tool in request.tools)
    own_json = own is not None and own.parser_name == JSON_TOOLS
    is_free = choosing.mode == "auto" and request.wanted is None and not (own_json and strict)
    if own is not None and is_free:
        tools = [tool.shown() for tool in request.tools]
        parsed = partial(ParsedCalls, own.parse, own.parser_name, tools, short_ids)
        limits = CallLimits(1 if request.calls_once else MAX_CALLS, MAX_SAME_CALLS)
        return ToolPlan(CallReading(own.start, own.end, parsed, limits, is_held=False), None)
    start, end = (own.start, own.end) if own is not None and own_json else format.form
    named = choosing.name
    required = choosing.mode == "required"
    limits = CallLimits(
        calls=1 if request.calls_once else MAX_HELD_CALLS, same=1 if required else MAX_SAME_CALLS
    )
    functions = [t.function for t in request.tools if named in (None, t.function.name)]
    grammar = call_grammar(
        functions,
        start,
        end,
        required=required,
        most=limits.calls,
        reply=request.wanted,
    )
    streamed = partial(StreamedCalls, short_ids)
    return ToolPlan(CallReading(start, end, streamed, limits, is_held=True), grammar)
