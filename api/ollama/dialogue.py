"""Converts Ollama's requests to chat requests and completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from chairlift.api.ollama.request import (
    JSON_FORMAT,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerationRequest,
    OllamaMessage,
)
from chairlift.api.schemas.schemas import ChatRequest, CompletionRequest
from chairlift.engine.errors import RequestError

Fields = dict[str, Any]


def chat_request(request: OllamaChatRequest, model: str, thinks: bool) -> ChatRequest:
    """The equivalent chat request for the served ``model``; ``thinks`` is whether it marks its
    reasoning.

    Raises:
        RequestError, pydantic.ValidationError: fields contradict each other.
    """
    messages = messages_of(request.messages)
    last = messages[-1]
    return ChatRequest.model_validate(
        {
            **_chat_fields(request, model, thinks),
            "messages": messages,
            "tools": request.tools,
            # As at Ollama, the reply continues a last message of the assistant.
            "continue_final_message": last["role"] == "assistant"
            and bool(last["content"])
            and "tool_calls" not in last,
        }
    )


def prompt_request(request: OllamaGenerateRequest, model: str, thinks: bool) -> ChatRequest:
    """The chat request whose user says the prompt. Raises as ``chat_request``."""
    content = _content(request.prompt, request.images)
    messages: list[Fields] = [{"role": "user", "content": content}]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    return ChatRequest.model_validate(
        {**_chat_fields(request, model, thinks), "messages": messages}
    )


def completion_request(
    request: OllamaGenerateRequest, model: str, prompt: str | list[int]
) -> CompletionRequest:
    """The completion that continues ``prompt``, a text or token ids. Its ``max_tokens`` is absent.

    Raises: as ``chat_request``.
    """
    for name, value in (("think", request.think), ("images", request.images)):
        if value:
            raise RequestError(f"{name}: not with raw, suffix, or a model without a template", name)
    logprobs = request.top_logprobs if request.logprobs else None
    fields = {**_generation_fields(request, model), "prompt": prompt, "logprobs": logprobs}
    return CompletionRequest.model_validate(
        {**fields, "add_special_tokens": isinstance(prompt, str)}
    )


def messages_of(messages: Sequence[OllamaMessage]) -> list[Fields]:
    """The messages of a chat request.

    Calls and results without an id get one, in order: templates need to know which call a result
    belongs to.
    """
    converted = []
    # Calls whose result has not come yet, as (name, id).
    waiting: list[tuple[str, str]] = []
    count = 0
    for message in messages:
        content = _content(message.content, message.images)
        fields: Fields = {"role": message.role, "content": content}
        if message.thinking is not None and message.role == "assistant":
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            waiting = []
            calls = fields["tool_calls"] = []
            for call in message.tool_calls:
                # Mistral's templates accept only ids of nine letters and digits.
                identity = call.id or f"call{count % 100_000:05d}"
                count += 1
                waiting.append((call.function.name, identity))
                arguments = msgspec.json.encode(call.function.arguments).decode()
                function = {"name": call.function.name, "arguments": arguments}
                calls.append({"id": identity, "function": function})
        if message.role == "tool":
            fields["name"] = message.tool_name
            fields["tool_call_id"] = message.tool_call_id or _next_id(waiting, message.tool_name)
        converted.append(fields)
    return converted


def _content(text: str, images: Sequence[str] | None) -> str | list[Fields]:
    if not images:
        return text
    urls = [{"url": f"data:;base64,{image}"} for image in images]
    parts: list[Fields] = [{"type": "image_url", "image_url": url} for url in urls]
    return [*parts, {"type": "text", "text": text}]


def _next_id(waiting: list[tuple[str, str]], name: str | None) -> str | None:
    """Removes and returns the id of the first waiting call, of the function ``name`` if given."""
    for position, (called, identity) in enumerate(waiting):
        if name in (None, called):
            del waiting[position]
            return identity
    return None


def _chat_fields(request: OllamaGenerationRequest, model: str, thinks: bool) -> Fields:
    return {
        **_generation_fields(request, model),
        **_thinking(request, thinks),
        "max_tokens": request.options.max_tokens,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
    }


def _generation_fields(request: OllamaGenerationRequest, model: str) -> Fields:
    return {
        **request.options.sampling,
        "model": model,
        "stream": request.stream,
        "response_format": _response_format(request.format),
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "timeout": request.timeout,
    }


def _response_format(format: str) -> Fields | None:
    if not format:
        return None
    if format == JSON_FORMAT:
        return {"type": "json_object"}
    # Like Ollama, allow no properties that the schema does not mention.
    named = {"name": "format", "schema": format, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def _thinking(request: OllamaGenerationRequest, thinks: bool) -> Fields:
    """The fields for ``think``; absent, the model's template decides.

    Raises:
        RequestError: the model is asked to think, but marks no reasoning.
    """
    if request.think is None:
        return {}
    if request.think and not thinks:
        raise RequestError("think: this model does not mark its thoughts", "think")
    fields: Fields = {"chat_template_kwargs": {"enable_thinking": bool(request.think)}}
    if isinstance(request.think, str):
        fields["reasoning_effort"] = request.think
    return fields
