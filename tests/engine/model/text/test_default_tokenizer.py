"""The default model's tokenizer, rebuilt from its GGUF file."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.engine.detokenizing import TEXTS, streamed_text
from support.models import default_model_path

from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def smollm() -> Any:
    return load_tokenizer(ModelSource("smollm", "gguf", default_model_path()))


@pytest.mark.parametrize("text", TEXTS)
def test_texts_survive_a_round_trip(smollm: Any, text: str) -> None:
    ids = smollm.encode(text)
    assert smollm.decode(ids) == text
    assert streamed_text(smollm, ids) == text


def test_any_tokens_are_streamed_as_decoded(smollm: Any) -> None:
    rng = random.Random(0)
    for length in [1, 2, 3, 5, 8, 40, 200] * 5:
        ids = [rng.randrange(len(smollm)) for _ in range(length)]
        assert streamed_text(smollm, ids) == smollm.decode(ids)


def test_tokens_equal_llama_cpps(smollm: Any) -> None:
    # From llama-tokenize of llama.cpp b11434; digits stand alone, spaces join the next word.
    text = "Hello  world,   this\n\n is 12345 ünïcode 😀 <html> the end   "
    # fmt: off
    expected = [
        19556, 216, 905, 28, 256, 451, 1116, 314, 216, 33, 34, 35, 36, 37, 5549, 137, 94, 25972,
        4635, 40303, 218, 2067, 5699, 46, 260, 1112, 333,
    ]
    # fmt: on
    assert smollm.encode(text) == expected


def test_chat_template_and_special_tokens(smollm: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    text = smollm.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm.apply_chat_template(messages, add_generation_prompt=True)
    assert ids.count(1) == 3  # <|im_start|> of system, user, assistant
    assert smollm.decode(ids) == text
    # The end tokens of the base model and of the chat; the metadata names only the latter.
    assert smollm.eos_token_ids == {0, 2}


def test_detokenizers_are_independent(smollm: Any) -> None:
    one, other = smollm.detokenizer, smollm.detokenizer
    ids = smollm.encode("🎿")
    one.add_token(ids[0])
    other.add_token(smollm.encode("x")[0])
    assert other.text == "x"
    assert one.text == ""
