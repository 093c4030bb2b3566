"""Requests whose calls are cut, at every API."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.api.fake_engine import FakeEngine, Scripted, model_info

from chairlift.engine.messages import Submit


def writing(tokenizer: TokenizerWrapper, text: str) -> FakeEngine:
    """Its replies are ``text``, as far as max_tokens lets them go."""
    tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    def script(request: Submit, index: int) -> Scripted:
        most = request.params.max_tokens
        if most < len(tokens):
            return Scripted(tokens[:most], "length")
        return Scripted(tokens, ended_by_token=True)

    return FakeEngine(model_info(vocab_size=len(tokenizer)), script)


async def no_check(grammar: object) -> None:
    """Whether a grammar can be compiled is another test's business."""
