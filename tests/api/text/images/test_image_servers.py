"""Servers of vision models: files below a folder, texts only, and no chat template."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest
from support.api.server import serving
from support.vision.requests import NAME, chat, image_part, text_part
from support.vision.vision_dir import picture, vision_dir

pytestmark = pytest.mark.system


def test_images_from_files_below_a_folder(tmp_path: Path) -> None:
    model = vision_dir(tmp_path, "qwen2_vl")
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(picture(1))
    arguments = ("--served-model-name", NAME, "--allowed-local-media-path", str(folder))
    with serving(tmp_path, str(model), *arguments) as server:

        async def ask() -> None:
            async with server.client() as client:
                replies = [
                    await chat(client, part, text_part("What?"))
                    for part in (
                        {"type": "image_url", "image_url": {"url": f"{folder.as_uri()}/a.png"}},
                        image_part(picture(1)),
                    )
                ]
                texts = [reply.choices[0].message.content for reply in replies]
                assert texts[0] == texts[1]
                elsewhere = {"url": f"{model.as_uri()}/config.json"}
                with pytest.raises(openai.BadRequestError, match="not below"):
                    await chat(client, {"type": "image_url", "image_url": elsewhere})

        asyncio.run(ask())


def test_text_only_serves_without_images(tmp_path: Path) -> None:
    model = vision_dir(tmp_path, "qwen2_vl")
    arguments = ("--served-model-name", NAME, "--text-only")
    with serving(tmp_path, str(model), *arguments) as server:

        async def ask() -> None:
            async with server.client() as client:
                assert (await chat(client, text_part("Hi"))).choices
                with pytest.raises(openai.BadRequestError, match="takes no images"):
                    await chat(client, image_part(picture(1)))

        asyncio.run(ask())


def test_a_model_without_chat_template(tmp_path: Path) -> None:
    model = vision_dir(tmp_path, "deepseek_vl_v2")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(tmp_path, str(model), "--served-model-name", NAME) as server:

        async def ask() -> None:
            async with server.client() as client:
                reply = await chat(client, image_part(picture(1, 16, 16)), text_part("What?"))
                # BOS, a view and a tile, two tokens for roles, and the rest of mlx-vlm's format.
                assert reply.usage.prompt_tokens == 1 + 13 + 2 + len(": \nWhat?\n\n:")
                reply = await chat(client, *[image_part(picture(1))] * 3)
                assert reply.usage.prompt_tokens == 1 + 3 * 13 + 2 + len(": \n\n\n\n\n:")

        asyncio.run(ask())
