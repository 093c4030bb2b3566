"""Tools and tool choice, as pydantic models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from chairlift.api.schemas.fields import JsonObject
from chairlift.api.schemas.request import Request

MAX_TOOLS = 128
# The characters that OpenAI allows, and dots, which qualified names contain.
MAX_NAME_CHARS = 128
_NAME = rf"^[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}$"

Name = Annotated[str, Field(pattern=_NAME)]


class Function(Request):
    """``parameters`` is the JSON schema of the arguments; None means no arguments."""

    name: Name
    description: str = ""
    parameters: JsonObject | None = None
    strict: bool = False


class Tool(Request):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool for templates and parsers; it has all fields, because some read absent ones."""
        function = self.function
        parameters = function.parameters or {"type": "object", "properties": {}}
        fields = {"name": function.name, "description": function.description}
        return {"type": "function", "function": {**fields, "parameters": parameters}}


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must not or must call a function.

    Attributes:
        mode: whether it may, must not or must.
        name: the function that it must call, or None.
        allowed: the functions that it may call; None means all.
    """

    mode: Literal["none", "auto", "required"]
    name: str | None = None
    allowed: frozenset[str] | None = None


def _tool_choice(value: object) -> ToolChoice:
    match value:
        case ToolChoice():
            return value
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", name)
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)}:
            return _allowed(allowed)
    raise ValueError(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    )


def _allowed(value: dict[str, Any]) -> ToolChoice:
    mode, tools = value.get("mode"), value.get("tools")
    if mode != "auto" and mode != "required":
        raise ValueError('allowed_tools.mode must be "auto" or "required"')
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise ValueError(f"allowed_tools.tools must hold 1 to {MAX_TOOLS} tools")
    names = []
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)}}:
                names.append(name[:MAX_NAME_CHARS])
            case _:
                raise ValueError(
                    'each of allowed_tools.tools must be {"type": "function", "function": '
                    '{"name": ...}}'
                )
    return ToolChoice(mode, allowed=frozenset(names))


def _object(**properties: object) -> dict[str, object]:
    """The JSON schema of an object with these fields, all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_ONE = _object(type={"const": "function"}, function=_object(name={"type": "string"}))
_SOME = _object(
    type={"const": "allowed_tools"},
    allowed_tools=_object(
        mode={"enum": ["auto", "required"]},
        tools={"type": "array", "items": _ONE, "minItems": 1, "maxItems": MAX_TOOLS},
    ),
)
ToolChoiceField = Annotated[
    ToolChoice,
    BeforeValidator(_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _ONE, _SOME]}),
]
