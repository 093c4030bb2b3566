"""Tools and tool choice, as pydantic models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from chairlift.api.schemas.fields import JsonObject
from chairlift.api.schemas.request import Request

MAX_TOOLS = 128
# The characters that OpenAI allows, and dots, which qualified names contain.
_NAME = r"^[A-Za-z0-9_.-]{1,128}$"

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
    """Whether the model may, must not or must call a function; ``name`` is the one it must call."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


def _tool_choice(value: object) -> ToolChoice:
    match value:
        case ToolChoice():
            return value
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", name)
    raise ValueError(
        'must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
    )


ToolChoiceField = Annotated[
    ToolChoice,
    BeforeValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]
