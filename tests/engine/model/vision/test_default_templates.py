"""Models without a chat template have mlx-vlm's format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import Environment

from chairlift.engine.model.vision.processors.processing import template_of

USER = {"role": "user", "content": "What?"}
ANSWER = {"role": "assistant", "content": "It."}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be."}, USER],
    [USER, ANSWER, {"role": "user", "content": "And?"}],
]


def _rendered(template: str, messages: list[dict[str, Any]]) -> str:
    return Environment().from_string(template).render(messages=messages, add_generation_prompt=True)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_plain_conversation(messages: list[dict[str, Any]]) -> None:
    from mlx_vlm.prompt_utils import get_chat_template

    theirs = get_chat_template(SimpleNamespace(), messages, add_generation_prompt=True)
    assert _rendered(template_of("moondream3"), messages) == theirs


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("deepseek_vl_v2", "deepseek_vl_v2.processing_deepsek_vl_v2.DeepseekVLV2Processor"),
        ("unlimited_ocr", "unlimited_ocr.processing_unlimitedocr.UnlimitedOCRProcessor"),
        ("deepseekocr", "unlimited_ocr.processing_unlimitedocr.UnlimitedOCRProcessor"),
    ],
)
def test_the_format_of_a_processor(
    model_type: str, name: str, messages: list[dict[str, Any]]
) -> None:
    from pkgutil import resolve_name

    processor = resolve_name(f"mlx_vlm.models.{name}")
    theirs = _rendered(processor.default_chat_template.fget(None), messages)
    assert _rendered(template_of(model_type), messages) == theirs


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("model_type", ["falcon_ocr", "plamo2vl"])
def test_types_that_take_a_prompt_only(model_type: str, messages: list[dict[str, Any]]) -> None:
    from pkgutil import resolve_name

    from mlx_vlm.prompt_utils import apply_chat_template

    joined = resolve_name("mlx_vlm.models.plamo2vl.processing.Plamo2VLProcessor")
    processor = object.__new__(joined)
    theirs = apply_chat_template(processor, {"model_type": model_type}, messages)
    assert _rendered(template_of(model_type), messages) == theirs
