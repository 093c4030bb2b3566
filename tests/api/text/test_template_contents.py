"""Chat templates that take contents as texts, as lists of parts, or as both."""

from __future__ import annotations

import time

import pytest
from support.api.fake_engine import byte_tokenizer

from chairlift.api.chat.rendering import rendering_of
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text import vocabulary
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.errors import RequestError
from chairlift.engine.workers.pool import Workers

# As of SmolVLM, Idefics and LLaVA: of a content that is a text, it would write nothing.
PARTS = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}<image>{% endif %}{% endfor %}<end>"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
# Takes both, and shows which it got.
BOTH = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }};"
    "{% else %}{% for part in message['content'] %}<{{ part['text'] }}>{% endfor %}{% endif %}"
    "{% endfor %}"
)
CHAT = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": "It."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "?"}]},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PARTS, "System: <end>User: What?<end>Assistant: It.<end>User: And ?<end>Assistant:"),
        (BOTH, ";What?;It.;And ?;"),
        ("{% for message in messages %}{{ message.content }}|{% endfor %}", "|What?|It.|And ?|"),
        (
            "{{ raise_exception('odd') if messages | length == 1 }}{{ messages[1].content }}",
            "What?",
        ),
    ],
)
async def test_texts_come_in_the_form_that_the_template_takes(
    workers: Workers, template: str, expected: str
) -> None:
    words = Vocabulary(byte_tokenizer(template), 258, workers)
    request = ChatRequest.model_validate({"messages": CHAT})
    rendering = rendering_of(request.messages, request, words.format)
    assert await words.render_text(rendering) == expected


async def test_a_message_in_parts_is_continued(workers: Workers) -> None:
    words = Vocabulary(byte_tokenizer(PARTS), 258, workers)
    request = ChatRequest.model_validate({"messages": CHAT[1:3], "continue_final_message": True})
    rendering = rendering_of(request.messages, request, words.format)
    assert await words.render_text(rendering) == "User: What?<end>Assistant: It."


async def test_the_time_limit_holds_for_conversations_with_calls(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "TEMPLATE_SECONDS", 1.0)
    endless = (
        "{# <tool_call> tool_call.name #}{% if messages | length > 1 %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )
    words = Vocabulary(byte_tokenizer(endless), 258, workers)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [CHAT[1], {"role": "assistant", "tool_calls": [call]}]
    request = ChatRequest.model_validate({"messages": messages})
    rendering = rendering_of(request.messages, request, words.format)
    assert "tool_calls" in rendering.messages[1]
    began = time.monotonic()
    with pytest.raises(RequestError, match="takes longer than 1 s"):
        await words.render_text(rendering)
    assert time.monotonic() - began < 1.8
