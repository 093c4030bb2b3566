"""Requests with images, in OpenAI's form."""

from __future__ import annotations

import base64
from typing import Any

from openai import AsyncOpenAI

# The name under which the tests serve a vision model.
NAME = "sees"


def image_url(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def image_part(file: bytes, media_type: str = "image/png", **fields: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image_url(file, media_type), **fields}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def chat(client: AsyncOpenAI, *content: dict[str, Any], **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(content)}]
    settings = {"model": NAME, "temperature": 0, "max_tokens": 12, **fields}
    return await client.chat.completions.create(messages=messages, **settings)
