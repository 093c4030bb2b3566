"""Texts become token ids of the model, or are refused."""

from __future__ import annotations

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.api.fake_engine import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chairlift.api.text.chat_format import ThinkTags, chat_format
from chairlift.api.text.fill_in import fill_in_prompt
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


PIECES = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁", "\n", "a", "b", "▁a", "▁b"]


@pytest.mark.parametrize("prepends", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize("after", ["b\n a", "\n\n b", " a", ""])
async def test_the_text_behind_a_gap_gets_no_space_in_front(
    workers: Workers, prepends: str, after: str
) -> None:
    backend = Tokenizer(models.BPE({p: n for n, p in enumerate(PIECES)}, [("▁", "a"), ("▁", "b")]))
    if prepends == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*strip, decoders.Strip(" ", 1, 0)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend)
    vocabulary = Vocabulary(TokenizerWrapper(wrapped), len(PIECES), workers)
    prompt = await fill_in_prompt(vocabulary, "a", after, "suffix", begun=after)
    assert prompt[0] == 0
    middle = prompt.index(2)
    tokens, begun = prompt[1:middle], prompt[middle + 1 :]
    pieces = wrapped.convert_ids_to_tokens(tokens)
    assert pieces[:2] == ["▁a", "▁<SUF>"]
    assert "".join(pieces[2:]).replace("▁", " ") == after
    assert begun == tokens[2:]


def test_the_tag_behind_a_thought_gets_no_space_in_front() -> None:
    pieces = [*"\n▁</think>", "▁<"]
    backend = Tokenizer(models.BPE({p: n for n, p in enumerate(pieces)}, [("▁", "<")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Metaspace()
    tokenizer = TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend))
    thoughts = chat_format(tokenizer, think_tags=ThinkTags("<think>", "</think>")).thoughts
    assert thoughts is not None
    # As after a line of reasoning.
    written = tokenizer.encode("k\n</think>", add_special_tokens=False)
    assert tuple(written[-8:]) == thoughts.end_tokens
