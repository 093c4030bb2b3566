"""Builds the arguments of the model's chat template from a request's messages and tools."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.api.chat.harmony_history import harmony_messages
from chairlift.api.chat.thoughts import template_settings
from chairlift.api.chat.tool_form import as_text, description
from chairlift.api.schemas.messages import Message
from chairlift.api.schemas.templating import Templating
from chairlift.api.text.chat_format import ChatFormat
from chairlift.api.text.template import Rendering, template_message


def rendering_of(
    messages: Sequence[Message], templating: Templating, format: ChatFormat
) -> Rendering:
    """The arguments of the chat template.

    The template describes the tools to a model with a native format of calls. For other models, a
    description is added to the system message, and calls become text.
    """
    knows_developer = format.knows("developer")
    tools = [tool.for_template() for tool in templating.callable_tools]
    if format.harmony is not None:
        rendered = harmony_messages(messages, knows_developer)
    elif format.calls is not None:
        rendered = [template_message(message, knows_developer) for message in messages]
    else:
        instructions = description(tools, not templating.calls_once) if tools else None
        rendered, tools = as_text(messages, instructions, knows_developer), []
    return Rendering(
        rendered,
        tools,
        templating.opens_a_reply,
        templating.continue_final_message,
        template_settings(templating),
    )
