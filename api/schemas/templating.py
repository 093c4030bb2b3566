"""Request fields that control how a conversation becomes a prompt."""

from __future__ import annotations

from typing import Any, Literal, Self

import msgspec
from pydantic import model_validator

from chairlift.api.schemas.fields import TemplateKwargs
from chairlift.api.schemas.messages import Messages
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.tools import ToolChoice, ToolChoiceField, Tools
from chairlift.engine.errors import RequestError

# OpenAI's values, and Anthropic's "max".
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Templating(Request):
    """The fields that a chat template's result depends on, besides the messages.

    ``add_generation_prompt`` None means the opposite of ``continue_final_message``.
    """

    tools: Tools = []
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = {}
    reasoning_effort: Effort | None = None

    @model_validator(mode="before")
    @classmethod
    def _a_choice_needs_tools(cls, data: Any) -> Any:
        # Requests converted from other APIs have a ToolChoice here, which may be their default.
        if isinstance(data, dict) and data.get("tool_choice") == "auto" and not data.get("tools"):
            raise RequestError("tool_choice needs tools", "tool_choice")
        return data

    @model_validator(mode="after")
    def _tools_fit_the_choice(self) -> Self:
        names = {tool.function.name for tool in self.tools}
        if len(names) < len(self.tools):
            raise RequestError("tools: two functions have the same name", "tools")
        choice = self.effective_choice
        if choice.mode == "required" and not names:
            raise RequestError("tool_choice needs tools", "tool_choice")
        chosen = (choice.allowed or frozenset()) if choice.name is None else {choice.name}
        if missing := chosen - names:
            raise RequestError(
                f"tool_choice: {min(missing)[:128]!r} is not one of the tools", "tool_choice"
            )
        return self

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt cannot both be true",
                "continue_final_message",
            )
        return self

    @property
    def opens_a_reply(self) -> bool:
        """Whether the prompt ends with the beginning of a new message of the assistant."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def effective_choice(self) -> ToolChoice:
        """``tool_choice``, or its default."""
        return self.tool_choice or ToolChoice("auto")

    @property
    def callable_tools(self) -> Tools:
        """The functions that the prompt shows to the model."""
        choice = self.effective_choice
        if choice.mode == "none":
            return []
        if choice.allowed is None:
            return self.tools
        return [tool for tool in self.tools if tool.function.name in choice.allowed]

    @property
    def calls_once(self) -> bool:
        """Whether a reply may have only one call.

        The client can set that, and naming the function to call implies it.
        """
        return not self.parallel_tool_calls or self.effective_choice.name is not None

    @property
    def tool_chars(self) -> int:
        """The number of characters of the tools that a template may render."""
        return sum(len(msgspec.json.encode(tool.for_template())) for tool in self.callable_tools)

    def check_end(self, messages: Messages) -> None:
        """Raises RequestError if the last message is to be continued but cannot be."""
        last = messages[-1]
        if self.continue_final_message and (
            last.role != "assistant" or last.tool_calls or not last.content
        ):
            raise RequestError(
                "continue_final_message needs an assistant's message as the last one, with "
                "content and without calls",
                "continue_final_message",
            )
