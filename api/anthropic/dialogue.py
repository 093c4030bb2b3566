"""Converts a request of the Messages API to a chat request."""

from __future__ import annotations

from typing import Any

from chairlift.api.anthropic.history import messages_of
from chairlift.api.anthropic.request import (
    AnyChoice,
    MessagesPrompt,
    MessagesRequest,
    NoneChoice,
    OneToolChoice,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolChoiceInput,
)
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.schemas.tools import ToolChoice
from chairlift.engine.errors import RequestError

Fields = dict[str, Any]


def prompt_request(request: MessagesPrompt) -> ChatRequest:
    """A chat request with the same prompt, for counting its tokens.

    Raises:
        RequestError, pydantic.ValidationError: fields contradict each other.
    """
    return ChatRequest.model_validate(_prompt_fields(request))


def chat_request(request: MessagesRequest, thinks: bool) -> ChatRequest:
    """The equivalent chat request; ``thinks`` is whether the model marks its reasoning.

    Raises:
        RequestError, pydantic.ValidationError: fields contradict each other.
    """
    return ChatRequest.model_validate(
        {
            **_prompt_fields(request),
            "stream": request.stream,
            "max_tokens": request.max_tokens,
            # A model without reasoning stays within any thinking budget.
            "thinking_token_budget": _budget(request) if thinks else None,
            "stop": request.stop_sequences,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "repetition_penalty": request.repetition_penalty,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
            "timeout": request.timeout,
        }
    )


def _prompt_fields(request: MessagesPrompt) -> Fields:
    messages = messages_of(request.system, request.messages)
    return {
        "model": request.model,
        "messages": messages,
        "continue_final_message": _continues_last(messages),
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in request.tools
        ],
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": _parallel(request.tool_choice),
        "reasoning_effort": request.output_config.effort,
        "response_format": _response_format(request),
        "chat_template_kwargs": _template_kwargs(request),
    }


def _continues_last(messages: list[Fields]) -> bool:
    """Whether the reply continues the last message, as it does if that is the assistant's.

    Raises:
        RequestError: the assistant's last message has no text to continue, or has calls.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if "tool_calls" in last or not last.get("content"):
        raise RequestError("messages: only a text can be continued, as the last message")
    return True


def _tool_choice(request: MessagesPrompt) -> ToolChoice:
    match request.tool_choice:
        case NoneChoice():
            return ToolChoice("none")
        case AnyChoice():
            return ToolChoice("required")
        case OneToolChoice(name=name):
            return ToolChoice("required", name)
    return ToolChoice("auto")


def _parallel(choice: ToolChoiceInput) -> bool:
    return isinstance(choice, NoneChoice) or not choice.disable_parallel_tool_use


def _response_format(request: MessagesPrompt) -> Fields | None:
    reply_format = request.reply_format
    if reply_format is None:
        return None
    schema = {"name": "output", "schema": reply_format.schema_, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def _template_kwargs(request: MessagesPrompt) -> Fields:
    if request.thinking is None:
        return {}
    return {"enable_thinking": not isinstance(request.thinking, ThinkingDisabled)}


def _budget(request: MessagesRequest) -> int | None:
    thinking = request.thinking
    return thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None
