"""Texts become token ids of the model, or are refused."""

from __future__ import annotations

import pytest
from support.api.fake_engine import byte_tokenizer

from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.errors import RequestError
from chairlift.engine.workers.pool import Workers


async def test_a_text_with_a_token_that_the_model_lacks_is_refused(workers: Workers) -> None:
    tokenizer = byte_tokenizer()
    (token,) = tokenizer.encode("b", add_special_tokens=False)
    vocabulary = Vocabulary(tokenizer, token, workers)
    assert await vocabulary.encode("aa", add_special_tokens=False) == [token - 1] * 2
    with pytest.raises(RequestError, match=f"prompt: token id {token} is not in the model's"):
        await vocabulary.encode("ab", add_special_tokens=False)
