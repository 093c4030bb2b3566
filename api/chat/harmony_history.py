"""Conversations in the form that gpt-oss's template expects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from chairlift.api.schemas.messages import Message
from chairlift.api.text.template import TemplateMessage, template_message

_INSTRUCTIONS = ("system", "developer")


def harmony_messages(messages: Sequence[Message], knows_developer: bool) -> list[TemplateMessage]:
    """The messages, with one call in each and its result directly after it.

    The template has these limits, beyond which it drops or refuses parts of a conversation:

    - Only the first message may be an instruction: the leading ones are joined, and later ones
      become the user's.
    - A message has one call, and the results after it are named after that.
    - Reasoning is ``thinking``. Content next to a call is appended to it.
    """
    leading = list(takewhile(lambda message: message.role in _INSTRUCTIONS, messages))
    rendered = [template_message(message, knows_developer) for message in leading[:1]]
    for message in leading[1:]:
        rendered[0]["content"] += f"\n\n{message.content}"
    placed: set[int] = set()
    for place in range(len(leading), len(messages)):
        message = messages[place]
        if place in placed:
            continue
        results = _results_after(messages, place) if len(message.tool_calls) > 1 else {}
        for part in _parts(template_message(message, knows_developer)):
            rendered.append(part)
            calls = part.get("tool_calls") or [{}]
            result = results.pop(calls[0].get("id"), None)
            if result is not None:
                placed.add(result)
                rendered.append(template_message(messages[result], knows_developer))
    return rendered


def _results_after(messages: Sequence[Message], place: int) -> dict[str | None, int]:
    """The places of the results that directly follow a message, by their calls' ids."""
    results: dict[str | None, int] = {}
    for number in range(place + 1, len(messages)):
        if messages[number].role != "tool":
            break
        results.setdefault(messages[number].tool_call_id, number)
    return results


def _parts(message: TemplateMessage) -> Iterator[TemplateMessage]:
    """The message as the template takes it, once for each of its calls."""
    thought = message.pop("reasoning_content", None)
    message.pop("reasoning", None)
    if message["role"] in _INSTRUCTIONS:
        message["role"] = "user"
    calls = message.get("tool_calls")
    if not calls:
        yield message if thought is None else {**message, "thinking": thought}
        return
    texts = [text for text in (thought, message["content"]) if text]
    message["content"] = ""
    for call in calls:
        yield {**message, "thinking": "\n\n".join(texts), "tool_calls": [call]}
        texts = []
