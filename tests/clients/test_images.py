"""Images through the clients of OpenAI, Anthropic and Ollama, unmodified, from a real server."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ollama
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from support.api.server import Server, serving
from support.vision.requests import NAME, chat, image_part, image_url, text_part
from support.vision.vision_dir import picture, vision_dir

from chairlift.loadtest import cli
from chairlift.loadtest.servers.procfs import tree

pytestmark = pytest.mark.system

SVG = b'<svg xmlns="http://www.w3.org/2000/svg"/>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sees")
    model = vision_dir(folder, "qwen2_vl", seed=1)
    with serving(folder, str(model), "--served-model-name", NAME) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with server.client() as client:
        yield client


@pytest.fixture
async def claude(server: Server) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        yield client


async def test_all_apis_show_the_model_the_same_image(
    server: Server, client: AsyncOpenAI, claude: AsyncAnthropic
) -> None:
    file = picture(1)
    completion = await chat(client, image_part(file), text_part("What?"))
    response = await client.responses.create(
        model=NAME,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": image_url(file), "detail": "auto"},
                    {"type": "input_text", "text": "What?"},
                ],
            }
        ],
        temperature=0,
        max_output_tokens=12,
    )
    data = base64.b64encode(file).decode()
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "image", "source": source}, text_part("What?")]
    message = await claude.messages.create(
        model=NAME,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0},
        max_tokens=12,
    )
    text = completion.choices[0].message.content
    assert text
    assert response.output_text == text
    assert [block.text for block in message.content if block.type == "text"] == [text]
    async with ollama.AsyncClient(server.url) as llama:
        options = {"temperature": 0, "num_predict": 12}
        asked: Any = [{"role": "user", "content": "What?", "images": [file]}]
        assert (await llama.chat(NAME, asked, options=options)).message.content == text
        generated = await llama.generate(NAME, "What?", images=[file], options=options)
        assert generated.response == text
        shown = await llama.show(NAME)
        assert "vision" in (shown.capabilities or [])
    other = await chat(client, image_part(picture(2)), text_part("What?"))
    assert other.choices[0].message.content != text
    counted = await claude.messages.count_tokens(
        model=NAME, messages=[{"role": "user", "content": content}]
    )
    # 40 x 24 pixels are 5 x 3 merged patches of 8 x 8.
    plain = await chat(client, text_part("What?"))
    used = completion.usage.prompt_tokens
    assert counted.input_tokens == used == plain.usage.prompt_tokens + 15 + 2
    assert response.usage is not None
    assert response.usage.input_tokens == used


def test_the_server_says_that_its_model_sees(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url}/v1/models/{NAME}") as card:
        assert json.load(card)["input_modalities"] == ["text", "image"]
    with urllib.request.urlopen(f"{server.url}/props") as props:
        assert json.load(props)["modalities"] == {"vision": True, "audio": False}


async def test_the_next_turn_computes_neither_image_nor_prompt_again(
    server: Server, client: AsyncOpenAI
) -> None:
    first = await chat(client, image_part(picture(11)), text_part("Describe this at some length."))
    before = server.metrics().total("chairlift_image_encode_seconds_count")
    messages: Any = [
        {
            "role": "user",
            "content": [image_part(picture(11)), text_part("Describe this at some length.")],
        },
        {"role": "assistant", "content": "It is grey."},
        {"role": "user", "content": [text_part("And this? "), image_part(picture(12))]},
    ]
    settings: Any = {"model": NAME, "temperature": 0, "max_tokens": 4}
    second = await client.chat.completions.create(messages=messages, **settings)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens
    metrics = server.metrics()
    assert metrics.total("chairlift_image_encode_seconds_count") == before + 1
    assert metrics.total("vllm:mm_cache_queries_total") >= 3
    assert metrics.total("vllm:mm_cache_hits_total") >= 1


async def test_a_stored_response_keeps_its_images(client: AsyncOpenAI) -> None:
    question: Any = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": image_url(picture(3)), "detail": "low"},
                {"type": "input_text", "text": "What?"},
            ],
        }
    ]
    settings: Any = {"model": NAME, "temperature": 0, "max_output_tokens": 8}
    first = await client.responses.create(input=question, **settings)
    then = await client.responses.create(input="And?", previous_response_id=first.id, **settings)
    whole = [*question, {"role": "assistant", "content": first.output_text}]
    again = await client.responses.create(
        input=[*whole, {"role": "user", "content": "And?"}], **settings
    )
    assert then.output_text == again.output_text
    assert then.usage.input_tokens == again.usage.input_tokens


async def test_tool_results_may_be_images(claude: AsyncAnthropic, client: AsyncOpenAI) -> None:
    image = {"type": "base64", "media_type": "image/png", "data": image_url(picture(5))[22:]}
    asked: Any = [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [
                        {"type": "text", "text": "here"},
                        {"type": "image", "source": image},
                    ],
                }
            ],
        },
    ]
    reply = await claude.messages.create(model=NAME, messages=asked, max_tokens=4)
    # Anthropic's count leaves out what is cached.
    count = reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
    assert count > 40
    output: Any = [
        {"role": "user", "content": "Look"},
        {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "t",
            "output": [
                {"type": "input_text", "text": "here"},
                {"type": "input_image", "image_url": image_url(picture(5))},
            ],
        },
    ]
    response = await client.responses.create(model=NAME, input=output, max_output_tokens=4)
    assert response.usage is not None
    assert response.usage.input_tokens == count


async def test_streams_with_and_without_images_in_one_batch(client: AsyncOpenAI) -> None:
    def contents(number: int) -> list[dict[str, Any]]:
        images = [image_part(picture(20 + i)) for i in range(number % 3)]
        return [*images, text_part(f"Question {number}?")]

    alone = [(await chat(client, *contents(i))).choices[0].message.content for i in range(9)]

    async def streamed(number: int) -> str:
        stream = await chat(client, *contents(number), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert await asyncio.gather(*map(streamed, range(9))) == alone


async def test_a_stream_survives_its_engine(server: Server, client: AsyncOpenAI) -> None:
    content = [image_part(picture(31)), text_part("Long?")]
    settings: Any = {"max_tokens": 80, "extra_body": {"ignore_eos": True}}
    expected = (await chat(client, *content, **settings)).choices[0].message.content
    stream = await chat(client, *content, stream=True, **settings)
    texts: list[str] = []
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")
        if len(texts) == 20:
            os.kill(tree(server.process.pid)[1], signal.SIGKILL)  # the engine
    assert "".join(texts) == expected


def test_a_load_of_random_images_agrees_with_the_server(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    flags = ["--base-url", server.url, "--backend", "openai-chat", "--dataset-name", "random-mm"]
    flags += ["--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "20"]
    flags += ["--random-mm-base-items-per-request", "2", "--random-mm-bucket-config"]
    flags += ["{(24, 40, 1): 1}", "--cancel-rate", "0.3", "--check-metrics", "--disable-tqdm"]
    assert cli.run(parser.parse_args(flags)) == cli.EXIT_OK, capsys.readouterr()
    assert "Client and server agree:" in capsys.readouterr().out


HOSTILE = {
    "svg": (image_part(SVG, "image/svg+xml"), "not an image"),
    "svg as png": (image_part(SVG), "not an image"),
    "another type": (image_part(picture(1, kind="JPEG")), "said to be 'image/png'"),
    "cut short": (image_part(picture(1)[:400]), "damaged"),
    "empty": (image_part(b""), "empty"),
    "no base64": ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "base64"),
    "broken base64": (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,a*b"}},
        "damaged",
    ),
    "another scheme": (
        {"type": "image_url", "image_url": {"url": "ftp://host/a.png"}},
        "must begin",
    ),
    "a host": ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, "image 1"),
    "a file": ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image 1"),
    "no url": ({"type": "image_url", "image_url": {}}, "image_url"),
    "detail": (image_part(picture(1), detail="fine"), "detail"),
    "a mark": (text_part("<|image_pad|>"), "2 places for 1 images"),
    "thin": (image_part(picture(1, 2000, 2)), "refuses the images"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_images_get_a_400(client: AsyncOpenAI, name: str) -> None:
    part, reason = HOSTILE[name]
    parts = [part, image_part(picture(1))] if name == "a mark" else [part]
    with pytest.raises(openai.BadRequestError, match=reason):
        await chat(client, *parts, text_part("What?"))
    assert (await chat(client, image_part(picture(1)), text_part("What?"))).choices


async def test_too_many_images_get_a_400(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 64 images"):
        await chat(client, *[image_part(picture(1))] * 65)


async def test_only_users_and_tools_show_images(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "system", "content": [image_part(picture(1))]}]
    with pytest.raises(openai.BadRequestError, match="system must not contain images"):
        await client.chat.completions.create(model=NAME, messages=messages)
