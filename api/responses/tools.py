"""The tools of a request, and which of them the model may or must call.

Only functions are supported. Tools of other types are dropped with a warning in the log. If the
request requires a call and no function is left, it is refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator

from chairlift.api.schemas.field_types import Callers, Ignored
from chairlift.api.schemas.fields import known_kind
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.tools import MAX_TOOLS, Function, Name, ToolChoice
from chairlift.engine.errors import RequestError

logger = logging.getLogger(__name__)

_TYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")


class FunctionTool(Function):
    """A function as in chat completions, but flat. ``defer_loading`` is ignored."""

    type: Literal["function"]
    allowed_callers: Callers | None = None
    defer_loading: Ignored = None
    output_schema: Ignored = None


@dataclass(frozen=True, slots=True)
class OtherTool:
    """A tool that this server does not run."""

    type: str


def _tool(value: object) -> FunctionTool | OtherTool:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise ValueError('must be an object with a "type"')
    if kind == "function":
        return FunctionTool.model_validate(value)
    if not _TYPE.fullmatch(kind):
        raise ValueError(f"{kind[:64]!r} is not a type of tools")
    return OtherTool(kind)


Tools = Annotated[
    list[
        Annotated[
            FunctionTool | OtherTool, PlainValidator(_tool, json_schema_input_type=FunctionTool)
        ]
    ],
    Field(max_length=MAX_TOOLS),
]


class FunctionChoice(Request):
    type: Literal["function"]
    name: Name


class AllowedTool(Request):
    type: str
    name: Annotated[str, Field(max_length=256)] | None = None
    server_label: Ignored = None


class AllowedTools(Request):
    """A choice that restricts calls to some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(max_length=MAX_TOOLS)]


ToolChoiceInput = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools


def _choice(value: object) -> ToolChoiceInput:
    match value:
        case "none" | "auto" | "required":
            return value
        case str():
            raise ValueError("must be none, auto, required, or an object")
        case {"type": "allowed_tools"}:
            return AllowedTools.model_validate(value)
        case {"type": str(kind), "name": str(name)} if kind != "function":
            raise ValueError(f"the tool {name[:64]!r} has the unsupported type {kind[:64]!r}")
    check = known_kind("tool choices", "function", "allowed_tools")
    return FunctionChoice.model_validate(check(value))


ToolChoiceField = Annotated[
    ToolChoiceInput, PlainValidator(_choice, json_schema_input_type=ToolChoiceInput)
]


class SelectedTools(NamedTuple):
    """The functions that the model sees, and whether it must call one."""

    tools: list[FunctionTool]
    choice: ToolChoice


def select_tools(
    tools: Sequence[FunctionTool | OtherTool], choice: ToolChoiceInput
) -> SelectedTools:
    """Selects the functions for the model, and logs the types of tools that are dropped.

    Raises:
        RequestError: a call is required, but no function is left.
    """
    functions = [tool for tool in tools if isinstance(tool, FunctionTool)]
    others = {tool.type: None for tool in tools if isinstance(tool, OtherTool)}
    if isinstance(choice, AllowedTools):
        others |= {tool.type: None for tool in choice.tools if tool.type != "function"}
        functions = _allowed(functions, choice)
        choice = choice.mode
    if isinstance(choice, FunctionChoice):
        tool_choice = ToolChoice("required", choice.name)
    else:
        tool_choice = ToolChoice(choice)
    if tool_choice.mode == "required" and not functions and others:
        raise RequestError(
            f"tool_choice: a call is required, but this server runs no tool of type "
            f"{', '.join(others)[:512]!r}",
            "tool_choice",
        )
    if others:
        logger.warning("left out tools of types that are not run: %s", ", ".join(others)[:512])
    return SelectedTools(functions, tool_choice)


def _allowed(functions: list[FunctionTool], choice: AllowedTools) -> list[FunctionTool]:
    names = {tool.name for tool in choice.tools if tool.type == "function"}
    for missing in names - {function.name for function in functions}:
        raise RequestError(
            f"tool_choice.tools: {str(missing)[:128]!r} is not one of the tools", "tool_choice"
        )
    return [function for function in functions if function.name in names]


def function_of(tool: FunctionTool) -> dict[str, Any]:
    """The function without the fields that only the Responses API has."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
