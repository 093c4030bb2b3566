"""Batches with OpenAI's client, from the upload to the results."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from openai.types import Batch
from support.api.api_server import MESSAGES

ENDED = ("completed", "failed", "expired", "cancelled")


def request(number: int, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    body = {"model": "org/tiny", "messages": MESSAGES} | body
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def lines(*requests: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in requests)


async def upload(client: openai.AsyncOpenAI, content: bytes, name: str = "in.jsonl") -> str:
    return (await client.files.create(file=(name, content), purpose="batch")).id


async def begin(
    client: openai.AsyncOpenAI, content: bytes, endpoint: Any = "/v1/chat/completions", **more: Any
) -> Batch:
    return await client.batches.create(
        input_file_id=await upload(client, content),
        endpoint=endpoint,
        completion_window="24h",
        **more,
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Batch:
    async with asyncio.timeout(180):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ENDED:
                return batch
            await asyncio.sleep(0.02)


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]
