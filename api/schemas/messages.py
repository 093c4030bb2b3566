"""The messages of a conversation, as pydantic models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from chairlift.api.schemas.bounds import MAX_VALUES, values_in
from chairlift.api.schemas.fields import MISSING, Content
from chairlift.api.schemas.images import MAX_IMAGES, ImageReference, PlacedImage, placed_images
from chairlift.api.schemas.request import Request
from chairlift.engine.errors import RequestError

MAX_MESSAGES = 4096
# More calls in one reply are a mistake of the model, and the template would render all of them.
MAX_CALLS = 128


class FunctionCall(Request):
    """``arguments`` is JSON, as the model wrote it."""

    name: str
    arguments: str = ""


class ToolCall(Request):
    """A call that the model made earlier."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Request):
    """A message of a conversation.

    ``content`` is its text; ``images`` are those between the texts.
    ``reasoning`` is another name for ``reasoning_content``, the model's reasoning before the
    message. An assistant's message without ``content`` gets that of ``refusal``.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    refusal: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] = []
    reasoning_content: str | None = None
    reasoning: str | None = None
    _images: tuple[PlacedImage, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _with_images(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        message = handler(data)
        images = placed_images(data.get("content")) if isinstance(data, dict) else ()
        if images:
            if message.role not in ("user", "tool"):
                raise ValueError(f"a message of the role {message.role} must not contain images")
            message._images = images
        return message

    @model_validator(mode="before")
    @classmethod
    def _has_content(cls, data: Any) -> Any:
        """Only an assistant's message may lack content, because it may be a call or a refusal."""
        if isinstance(data, dict) and data.get("content") is None:
            if data.get("role") != "assistant":
                return {**data, "content": MISSING}
            if isinstance(refusal := data.get("refusal"), str):
                return {**data, "content": refusal}
        return data

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images, in the order of their places in ``content``."""
        return self._images

    @property
    def thought(self) -> str | None:
        """The model's reasoning before this message, if the client sent it back."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    @property
    def chars(self) -> int:
        """The number of characters of this message that a template may render."""
        texts = [self.content, self.thought, self.name, self.tool_call_id]
        for call in self.tool_calls:
            texts += [call.id, call.function.name, call.function.arguments]
        return sum(len(text) for text in texts if text is not None)


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def check_arguments(messages: Iterable[Message]) -> None:
    """Raises RequestError if the arguments of all calls, which are JSON, hold too many values."""
    remaining = MAX_VALUES
    for message in messages:
        for call in message.tool_calls:
            remaining -= values_in(call.function.arguments, remaining)
            if remaining < 0:
                raise RequestError(
                    f"messages: the arguments of all calls hold more than {MAX_VALUES} values",
                    "messages",
                )


def images_of(messages: Iterable[Message]) -> list[ImageReference]:
    """The images of a conversation. Raises RequestError if there are too many."""
    images = [placed.image for message in messages for placed in message.images]
    if len(images) > MAX_IMAGES:
        raise RequestError(f"messages: at most {MAX_IMAGES} images, not {len(images)}", "messages")
    return images


def chars_of(messages: Iterable[Message]) -> int:
    """The number of characters of a conversation."""
    return sum(message.chars for message in messages)
