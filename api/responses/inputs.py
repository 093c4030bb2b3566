"""The items of a request as pydantic models, and their conversion to the stored ``items``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from chairlift.api.responses.compaction import summary_in
from chairlift.api.responses.hosted import HostedInput, Id
from chairlift.api.responses.items import (
    CompactionItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    Item,
    MessageItem,
    OutputRefusal,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
    new_id,
)
from chairlift.api.responses.parts import (
    InputImagePart,
    Parts,
    ReasoningTextPart,
    RefusalPart,
    SummaryTextPart,
    text_of,
)
from chairlift.api.schemas.field_types import Ignored
from chairlift.api.schemas.fields import known_kind
from chairlift.api.schemas.messages import MAX_MESSAGES
from chairlift.api.schemas.request import Request
from chairlift.api.schemas.tools import Name

Status = Literal["in_progress", "completed", "incomplete"]


class MessageInput(Request):
    """A message. ``type`` may be absent. Only OpenAI's models use ``phase``."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    id: Id | None = None
    status: Status | None = None
    phase: Ignored = None

    @model_validator(mode="after")
    def _images_are_the_users(self) -> Self:
        if self.role != "user" and any(isinstance(part, InputImagePart) for part in self.content):
            raise ValueError("input_image parts belong to user messages")
        return self

    def items(self) -> list[Item]:
        """The stored form: an assistant's text is output text, any other text is input text."""
        kind = OutputText if self.role == "assistant" else InputText
        content: list[InputText | InputImage | OutputText | OutputRefusal] = []
        for part in self.content:
            match part:
                case RefusalPart():
                    content.append(OutputRefusal(part.refusal))
                case InputImagePart():
                    content.append(InputImage(part.image_url, part.detail))
                case _:
                    content.append(kind(part.text))
        return [MessageItem(self.id or new_id("msg"), self.role, content)]


class FunctionCallInput(Request):
    type: Literal["function_call"]
    call_id: Id
    name: Name
    arguments: str
    id: Id | None = None
    status: Status | None = None
    namespace: Ignored = None
    caller: Ignored = None

    def items(self) -> list[Item]:
        """The stored form."""
        return [FunctionCallItem(self.id or new_id("fc"), self.call_id, self.name, self.arguments)]


class FunctionCallOutputInput(Request):
    type: Literal["function_call_output"]
    call_id: Id
    output: Parts
    id: Id | None = None
    status: Status | None = None
    name: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None

    def items(self) -> list[Item]:
        """The stored form."""
        item_id = self.id or new_id("fco")
        output: str | list[InputText | InputImage] = text_of(self.output)
        if any(isinstance(part, InputImagePart) for part in self.output):
            output = [
                InputImage(part.image_url, part.detail)
                if isinstance(part, InputImagePart)
                else InputText(part.shown)
                for part in self.output
            ]
        return [FunctionCallOutputItem(item_id, self.call_id, output)]


class ReasoningInput(Request):
    """A model's reasoning. Encrypted reasoning comes from another server and cannot be read."""

    type: Literal["reasoning"]
    content: list[ReasoningTextPart] = []
    summary: list[SummaryTextPart] = []
    id: Id | None = None
    status: Status | None = None
    encrypted_content: Ignored = None

    def items(self) -> list[Item]:
        """The stored form."""
        content = [ReasoningText(part.text) for part in self.content]
        summary = [SummaryText(part.text) for part in self.summary]
        return [ReasoningItem(self.id or new_id("rs"), content, summary)]


class CompactionInput(Request):
    """A compaction made by /v1/responses/compact of this server; others cannot be read."""

    type: Literal["compaction"]
    encrypted_content: Annotated[str, BeforeValidator(summary_in)]
    id: Id | None = None
    created_by: Ignored = None

    def items(self) -> list[Item]:
        """The stored form."""
        return [CompactionItem(self.id or new_id("cmp"), self.encrypted_content)]


class ItemReferenceInput(Request):
    """A reference to a stored item."""

    type: Literal["item_reference"]
    id: Id


ConversationInput = (
    MessageInput
    | FunctionCallInput
    | FunctionCallOutputInput
    | ReasoningInput
    | CompactionInput
    | ItemReferenceInput
)
_check_kind = known_kind(
    "input items",
    *(
        get_args(kind.model_fields["type"].annotation)[0]
        for kind in (*get_args(ConversationInput), *get_args(HostedInput))
    ),
)


def _item(value: object) -> object:
    if isinstance(value, dict) and value.get("type") is None:
        if "role" in value:
            value = {**value, "type": "message"}
        elif "id" in value:
            value = {**value, "type": "item_reference"}
    return _check_kind(value)


InputItem = Annotated[
    ConversationInput | HostedInput,
    Field(discriminator="type"),
    BeforeValidator(_item),
]


def _items(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value


Input = Annotated[
    list[InputItem],
    Field(max_length=MAX_MESSAGES),
    BeforeValidator(_items, json_schema_input_type=str | list[InputItem]),
]


def references_in(given: Iterable[InputItem]) -> list[str]:
    """The ids of the stored items that a request's input refers to."""
    return [one.id for one in given if isinstance(one, ItemReferenceInput)]


def items_of(given: Iterable[InputItem], stored: Mapping[str, Item]) -> list[Item]:
    """The stored form of a request's input; ``stored`` maps ids to the items it refers to."""
    items: list[Item] = []
    for one in given:
        if isinstance(one, ItemReferenceInput):
            items.append(stored[one.id])
        else:
            items += one.items()
    return items
