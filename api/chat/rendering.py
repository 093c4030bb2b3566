"""What a request's conversation and tools are to the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.api.chat.thoughts import template_settings
from chairlift.api.chat.tool_form import as_text, description
from chairlift.api.schemas.messages import Message
from chairlift.api.schemas.templating import Templating
from chairlift.api.text.chat_format import ChatFormat
from chairlift.api.text.template import Rendering, shown


def rendering_of(
    messages: Sequence[Message], templating: Templating, format: ChatFormat
) -> Rendering:
    """A model with a format for calls is told of tools by its template, others by us."""
    knows_developer = format.knows("developer")
    tools = [tool.shown() for tool in templating.callable_tools]
    if format.calls is not None:
        told = [shown(message, knows_developer) for message in messages]
    else:
        how = description(tools, not templating.calls_once) if tools else None
        told, tools = as_text(messages, how, knows_developer), []
    return Rendering(
        told,
        tools,
        templating.opens_a_reply,
        templating.continue_final_message,
        template_settings(templating),
    )
