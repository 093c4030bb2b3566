"""Conversations with images become the text that a type's processor takes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from support.vision.vision_dir import chat_template, picture, vision_dir

from chairlift.api.schemas.images import ImageReference
from chairlift.api.text.images.loading import ImageLoader
from chairlift.api.text.images.vision import Vision
from chairlift.api.text.template import Rendering
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.errors import RequestError
from chairlift.engine.hub.source import ModelSource
from chairlift.engine.messages import ImagePrompt, ImageSource
from chairlift.engine.model.text.tokenizer import load_tokenizer
from chairlift.engine.model.vision.processors.loading import load_processor
from chairlift.engine.model.vision.processors.processing import template_of
from chairlift.engine.model.vision.processors.processor import prepare
from chairlift.engine.workers.job import Job
from chairlift.engine.workers.pool import Workers

# transformers warns of a field of the tiny configs.
pytestmark = pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")

TEXTS = chat_template(None)
# As ERNIE's.
URLS = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image_url' %}"
    "Picture:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
ERNIE = "Picture:<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>"


class Inline(Workers):
    """Runs jobs in the test's process."""

    async def run(self, job: Job) -> Any:
        first = []
        if job.fixture is not None:
            make, arguments = job.fixture.make()
            first = [make(*arguments)]
        return job.function(*first, *job.args)


def _turns(*texts: str) -> str:
    roles = ["user", "assistant"]
    turns = [
        f"<|im_start|>{roles[number % 2]}\n{text}<|im_end|>\n" for number, text in enumerate(texts)
    ]
    return "".join(turns) + "<|im_start|>assistant\n"


IMAGE, WORDS = {"type": "image"}, {"type": "text", "text": "What?"}
TWICE = [[IMAGE, WORDS], "It.", [WORDS, IMAGE]]
ONCE = [[WORDS, IMAGE]]
DEEPSEEK = "<|User|>: <image>\nWhat?\n\n<|Assistant|> It.\n\n<|User|>: What?<image>\n\n\n"

_V41_IMAGE = "<\uff5cdeepseek_image\uff5c>"
V41 = (
    f"<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>{_V41_IMAGE}\n\nWhat?"
    "<\uff5cAssistant\uff5c>It.<\uff5cend\u2581of\u2581sentence\uff5c>"
    f"<\uff5cUser\uff5c>What?\n\n{_V41_IMAGE}<\uff5cAssistant\uff5c></think>"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "template", "contents", "expected"),
    [
        ("deepseek_v41", None, TWICE, V41),
        ("deepseek_vl_v2", None, TWICE, DEEPSEEK + "<|Assistant|>:"),
        ("deepseekocr", None, [[IMAGE, WORDS]], "<image>\nWhat?"),
        ("ernie4_5_moe_vl", URLS, TWICE, f"{ERNIE}What?It.What?{ERNIE}"),
        ("falcon_ocr", None, ONCE, "What?"),
        ("fastvlm", TEXTS, ONCE, _turns("What?<image>\n")),
        ("got", None, ONCE, "What?"),
        ("kimi_vl", chat_template("<|media_pad|>"), ONCE, _turns("What?<|media_pad|>")),
        ("llava_next", chat_template("<image>"), ONCE, _turns("What?<image>")),
        ("minicpmv4_6", TEXTS, ONCE, _turns("What?(<image>./</image>)\n")),
        ("minicpmv4_7", chat_template("<|image_pad|>"), ONCE, _turns("What?<|image_pad|>")),
        ("moondream3", None, ONCE, "What?"),
        ("multi_modality", TEXTS, ONCE, _turns("What?<image>")),
        ("phi3_v", TEXTS, TWICE, _turns("<|image_1|>\nWhat?", "It.", "What?<|image_2|>\n")),
        ("phi4_siglip", TEXTS, ONCE, _turns("What?<image>\n")),
        ("plamo2vl", None, TWICE, "What?\nIt.\nWhat?"),
    ],
)
async def test_images_are_where_a_message_has_them(
    tmp_path: Path, model_type: str, template: str | None, contents: list[Any], expected: str
) -> None:
    path = vision_dir(tmp_path, model_type)
    _set_template(path, template)
    file = picture(1, 60, 40)
    prompt = await _prepared(path, model_type, contents, file)
    count = sum(part == IMAGE for content in contents for part in content)
    sources = [ImageSource(file, "image/png", "auto")] * count
    processor = load_processor(str(path), model_type, trust_remote_code=False)
    assert prompt == prepare(processor, expected, sources)


async def test_an_image_too_many_is_refused(tmp_path: Path) -> None:
    path = vision_dir(tmp_path, "moondream3")
    with pytest.raises(RequestError, match="a prompt of this model has at most 1 image"):
        await _prepared(path, "moondream3", TWICE, picture(1))


def _set_template(path: Path, template: str | None) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


async def _prepared(path: Path, model_type: str, contents: list[Any], file: bytes) -> ImagePrompt:
    """The prompt of a conversation, in which each image is ``file``."""
    source = ModelSource(path.name, "directory", path)
    tokenizer = load_tokenizer(source)
    if not tokenizer.has_chat_template:
        tokenizer = load_tokenizer(source, template_of(model_type))
    workers = Inline()
    vocabulary = Vocabulary(tokenizer, len(tokenizer), workers)
    vision = Vision(vocabulary, workers, ImageLoader(), path, model_type, False)
    roles = ["user", "assistant"]
    messages = [
        {"role": roles[number % 2], "content": content} for number, content in enumerate(contents)
    ]
    url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    count = sum(part == IMAGE for content in contents for part in content)
    return await vision.prepare(
        Rendering(messages, [], True, False, {}), [ImageReference(url)] * count
    )
