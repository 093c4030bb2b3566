"""Items of hosted tools, which another server or its client ran in an earlier turn.

This server runs no such tools. It shows them to the model, and stores them, as a function call and
its output.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, model_validator

from chairlift.api.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    new_id,
)
from chairlift.api.responses.parts import Parts, text_of
from chairlift.api.schemas.field_types import Ignored
from chairlift.api.schemas.fields import JsonObject
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.tools import Name

Id = Annotated[str, Field(min_length=1, max_length=256)]
Objects = Annotated[list[JsonObject], Field(max_length=1024)]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


class HostedItem(Request):
    """The base of all hosted items. The model does not see a call's status and caller."""

    id: Id | None = None
    status: Ignored = None
    caller: Ignored = None

    def items(self) -> list[Item]:
        """The items that replace this one in the store and for the model."""
        raise NotImplementedError

    def _call(self, name: str, arguments: str, call_id: str) -> FunctionCallItem:
        return FunctionCallItem(self.id or new_id("fc"), call_id, name, arguments)

    def _output(self, call_id: str, output: str) -> FunctionCallOutputItem:
        return FunctionCallOutputItem(self.id or new_id("fco"), call_id, output)

    def _both(self, name: str, arguments: Any, output: str) -> list[Item]:
        """The call and its output, for an item that contains both."""
        call_id = self.id or new_id("call")
        result = FunctionCallOutputItem(new_id("fco"), call_id, output)
        return [self._call(name, _json(arguments), call_id), result]


class CustomToolCallInput(HostedItem):
    """``input`` is free text. It becomes the property "input" of the function's arguments."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: Name
    input: str
    namespace: Ignored = None

    def items(self) -> list[Item]:
        return [self._call(self.name, _json({"input": self.input}), self.call_id)]


class CustomToolCallOutputInput(HostedItem):
    type: Literal["custom_tool_call_output"]
    call_id: Id
    output: Parts
    name: Ignored = None

    def items(self) -> list[Item]:
        return [self._output(self.call_id, text_of(self.output))]


class LocalShellCallInput(HostedItem):
    type: Literal["local_shell_call"]
    call_id: Id
    action: JsonObject

    def items(self) -> list[Item]:
        return [self._call("local_shell", _json(self.action), self.call_id)]


class LocalShellCallOutputInput(HostedItem):
    """``id`` is the id of the call. Some clients send ``call_id`` instead, as in other outputs."""

    type: Literal["local_shell_call_output"]
    call_id: Id | None = None
    output: str

    @model_validator(mode="after")
    def _names_its_call(self) -> Self:
        if self.call_id is None and self.id is None:
            raise ValueError("id or call_id must name the call")
        return self

    def items(self) -> list[Item]:
        call_id = self.call_id or self.id
        assert call_id is not None, "validated"
        return [FunctionCallOutputItem(new_id("fco"), call_id, self.output)]


class ShellCallInput(HostedItem):
    type: Literal["shell_call"]
    call_id: Id
    action: JsonObject
    environment: Ignored = None

    def items(self) -> list[Item]:
        return [self._call("shell", _json(self.action), self.call_id)]


class ShellCallOutputInput(HostedItem):
    type: Literal["shell_call_output"]
    call_id: Id
    output: Objects
    max_output_length: Ignored = None

    def items(self) -> list[Item]:
        return [self._output(self.call_id, _json(self.output))]


class ApplyPatchCallInput(HostedItem):
    type: Literal["apply_patch_call"]
    call_id: Id
    operation: JsonObject

    def items(self) -> list[Item]:
        return [self._call("apply_patch", _json(self.operation), self.call_id)]


class ApplyPatchCallOutputInput(HostedItem):
    type: Literal["apply_patch_call_output"]
    call_id: Id
    status: Literal["completed", "failed"]
    output: str | None = None

    def items(self) -> list[Item]:
        return [self._output(self.call_id, self.output or self.status)]


class McpCallInput(HostedItem):
    type: Literal["mcp_call"]
    name: Name
    arguments: str
    server_label: Ignored = None
    approval_request_id: Ignored = None
    output: str | None = None
    error: str | JsonObject | None = None

    def items(self) -> list[Item]:
        call_id = self.id or new_id("call")
        output = self.output or ""
        if self.error is not None:
            output = self.error if isinstance(self.error, str) else _json(self.error)
        result = FunctionCallOutputItem(new_id("fco"), call_id, output)
        return [self._call(self.name, self.arguments, call_id), result]


class McpListToolsInput(HostedItem):
    """Lists tools that this server does not run; it is dropped."""

    type: Literal["mcp_list_tools"]
    server_label: Ignored = None
    tools: Ignored = None
    error: Ignored = None

    def items(self) -> list[Item]:
        return []


class CodeInterpreterCallInput(HostedItem):
    type: Literal["code_interpreter_call"]
    code: str = ""
    container_id: Ignored = None
    outputs: Objects = []

    def items(self) -> list[Item]:
        return self._both("code_interpreter", {"code": self.code}, _json(self.outputs))


class WebSearchCallInput(HostedItem):
    """The results of the search are in the message after it."""

    type: Literal["web_search_call"]
    action: JsonObject = {}

    def items(self) -> list[Item]:
        return self._both("web_search", self.action, "")


class FileSearchCallInput(HostedItem):
    type: Literal["file_search_call"]
    queries: list[str]
    results: Objects = []

    def items(self) -> list[Item]:
        return self._both("file_search", {"queries": self.queries}, _json(self.results))


class ProgramInput(HostedItem):
    type: Literal["program"]
    call_id: Id
    code: str
    fingerprint: Ignored = None

    def items(self) -> list[Item]:
        return [self._call("program", _json({"code": self.code}), self.call_id)]


class ProgramOutputInput(HostedItem):
    type: Literal["program_output"]
    call_id: Id
    result: str

    def items(self) -> list[Item]:
        return [self._output(self.call_id, self.result)]


HostedInput = (
    CustomToolCallInput
    | CustomToolCallOutputInput
    | LocalShellCallInput
    | LocalShellCallOutputInput
    | ShellCallInput
    | ShellCallOutputInput
    | ApplyPatchCallInput
    | ApplyPatchCallOutputInput
    | McpCallInput
    | McpListToolsInput
    | CodeInterpreterCallInput
    | WebSearchCallInput
    | FileSearchCallInput
    | ProgramInput
    | ProgramOutputInput
)
