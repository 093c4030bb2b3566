"""The events of a response's stream. A struct's tag is the event's name."""

from __future__ import annotations

from msgspec import Struct

from chairlift.api.responses.items import OutputItem, OutputText, ReasoningText
from chairlift.api.responses.replies import Response
from chairlift.api.schemas.replies import TokenLogprob


class Event(Struct, tag_field="type", kw_only=True):
    """An event. ``sequence_number`` counts from 0 in each stream; ``OutputWriter.emit`` sets it."""

    sequence_number: int = 0


class Created(Event, tag="response.created"):
    response: Response


class Queued(Event, tag="response.queued"):
    response: Response


class InProgress(Event, tag="response.in_progress"):
    response: Response


class Completed(Event, tag="response.completed"):
    response: Response


class Incomplete(Event, tag="response.incomplete"):
    response: Response


class Failed(Event, tag="response.failed"):
    response: Response


class ErrorEvent(Event, tag="error"):
    message: str
    code: str | None
    param: str | None


class ItemAdded(Event, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _PartEvent(Event):
    output_index: int
    item_id: str
    content_index: int


class PartAdded(_PartEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(_PartEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(_PartEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_PartEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_PartEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_PartEvent, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(Event, tag="response.function_call_arguments.delta"):
    output_index: int
    item_id: str
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done"):
    output_index: int
    item_id: str
    name: str
    arguments: str


EVENTS: tuple[type[Event], ...] = (
    *(Created, Queued, InProgress, Completed, Incomplete, Failed, ErrorEvent, ItemAdded, ItemDone),
    *(PartAdded, PartDone, OutputTextDelta, OutputTextDone, ReasoningDelta, ReasoningDone),
    *(ArgumentsDelta, ArgumentsDone),
)
