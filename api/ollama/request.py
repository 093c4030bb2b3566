"""The bodies of Ollama's API, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from chairlift.api.ollama.options import OllamaOptions
from chairlift.api.schemas.field_types import Ignored, only
from chairlift.api.schemas.fields import JsonObject
from chairlift.api.schemas.messages import MAX_CALLS, MAX_MESSAGES
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.schemas import EngineRequest
from chairlift.api.schemas.structured import schema_text
from chairlift.api.schemas.tools import MAX_TOOLS, Tool
from chairlift.engine.messages import MAX_TOP_LOGPROBS

JSON_FORMAT = "json"


def _format(value: object) -> str:
    """ "json", a JSON schema's text, or "" for any text."""
    if value in ("", JSON_FORMAT):
        return str(value)
    if not isinstance(value, dict):
        raise ValueError('must be "json" or a JSON schema, which is an object')
    return schema_text(value)


Format = Annotated[
    str,
    BeforeValidator(_format),
    WithJsonSchema({"anyOf": [{"enum": ["", JSON_FORMAT]}, {"type": "object"}]}),
]
Think = bool | Literal["low", "medium", "high", "max"]
# Files in base64.
Images = list[str] | None


class OllamaCalledFunction(Request):
    name: str
    arguments: JsonObject = {}
    index: Ignored = None


class OllamaToolCall(Request):
    """A call that the model made earlier."""

    id: Annotated[str, Field(max_length=256)] = ""
    function: OllamaCalledFunction


class OllamaMessage(Request):
    """A message of a conversation. A tool's result names its call by ``tool_call_id``, or only the
    function by ``tool_name``. Images come before the text.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Images = None
    tool_calls: Annotated[list[OllamaToolCall], Field(max_length=MAX_CALLS)] = []
    tool_name: str | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class OllamaTool(Tool):
    type: Literal["function"] = "function"


class OllamaGenerationRequest(EngineRequest):
    """The fields that chat and generate share. ``priority``, ``timeout`` and ``cache_salt`` are
    extensions.

    No prompt is ever truncated and no context shifted: what is too long is refused.
    """

    stream: bool = True
    options: OllamaOptions = OllamaOptions()
    format: Format = ""
    think: Think | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    keep_alive: Ignored = None
    truncate: Annotated[Any, *only(False)] = None
    shift: Annotated[Any, *only(False)] = None


class OllamaChatRequest(OllamaGenerationRequest):
    """POST /api/chat. Without messages it generates nothing, and only checks the model."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] = []


class OllamaGenerateRequest(OllamaGenerationRequest):
    """POST /api/generate. Without prompt and images it generates nothing, and only checks the
    model.

    With ``raw`` the model continues the prompt as it is; otherwise the prompt is a user's message.
    With ``suffix`` the model fills the gap between prompt and suffix.
    """

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    template: Annotated[Any, *only("")] = None
    context: Annotated[Any, *only([])] = None
    images: Images = None
    # Of models that generate images.
    width: Annotated[Any, *only(0)] = None
    height: Annotated[Any, *only(0)] = None
    steps: Annotated[Any, *only(0)] = None


class OllamaEmbedRequest(EngineRequest):
    """POST /api/embed. Unless ``truncate`` is false, texts are cut to the context.

    Without a text it computes nothing, and only checks the model.
    """

    input: str | list[str] = []
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    options: Ignored = None
    keep_alive: Ignored = None


class OllamaEmbeddingsRequest(EngineRequest):
    """POST /api/embeddings, the older form for one text, which may be empty as at /api/embed."""

    prompt: str = ""
    options: Ignored = None
    keep_alive: Ignored = None


class OllamaShowRequest(Request):
    """POST /api/show; ``name`` is the older name of ``model``."""

    model: str | None = None
    name: str | None = None
    verbose: Ignored = None
