"""Reads a scripted reply that is cut, at any place, as the API reads a model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.api.api_server import MESSAGES, tool

from chairlift.api.chat import calls
from chairlift.api.chat.choice import DialogueChoice, ReplySyntax
from chairlift.api.chat.prepare import reply_syntax
from chairlift.api.chat.tool_plan import tool_plan
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text.chat_format import ThinkTags, chat_format
from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.messages import TokenLogprobs, TokenOutput
from chairlift.engine.workers.pool import Workers

FUNCTION = tool("f", {"type": "object", "properties": {"s": {"type": "string"}}})
OTHER = tool("g")
PROPERTY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(scope="module", autouse=True)
def unhurried() -> Iterator[None]:
    """A parser's time is wall time, which other processes take from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "PARSE_SECONDS", 60.0)
        yield


@dataclass
class Read:
    """What a choice tells its client."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish: str | None = None
    scored: int = 0


@cache
def vocabulary(tokenizer: TokenizerWrapper, tags: ThinkTags | None = None) -> Vocabulary:
    return Vocabulary(tokenizer, len(tokenizer), Workers(), chat_format(tokenizer, None, tags))


@cache
def reading(model: Model) -> ReplySyntax:
    """How a reply of a model is read."""
    known = vocabulary(model.tokenizer, model.tags)
    request = ChatRequest.model_validate(
        {"messages": MESSAGES, "tools": [FUNCTION, OTHER], **dict(model.fields)}
    )
    found = reply_syntax(request, known, tool_plan(request, known.format), thinks=False)
    assert found is not None
    return found


@dataclass(frozen=True)
class Model:
    """What reads the replies of a model, asked with ``fields``."""

    tokenizer: TokenizerWrapper
    fields: tuple[tuple[str, Any], ...] = ()
    tags: ThinkTags | None = None

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def read(
        self,
        tokens: Sequence[int],
        finish: str | None,
        sizes: Sequence[int] = (1,),
        ended_by: int | None = None,
        logprobs: bool = False,
    ) -> Read:
        """What comes of ``tokens``, which arrive as many at a time as ``sizes`` say in turn."""
        detokenizer = vocabulary(self.tokenizer, self.tags).detokenizer
        choice = DialogueChoice(0, reading(self), detokenizer, StopMatcher(Stops([])), logprobs)
        found = Read()
        at, turn = 0, 0
        whole = [*tokens, *([] if ended_by is None else [ended_by])]
        while found.finish is None and (at < len(whole) or (turn == 0 and finish)):
            size = sizes[turn % len(sizes)]
            turn += 1
            part = whole[at : at + size]
            at += size
            last = finish if at >= len(whole) else None
            scores = [TokenLogprobs(-1.0, [])] * len(part) if logprobs else None
            output = TokenOutput(
                "r",
                0,
                part,
                scores,
                last,  # type: ignore[arg-type]
                last is not None and ended_by is not None,
            )
            for piece in choice.take(output):
                found.scored += len(piece.scored or ())
                found.finish = piece.finish
                if piece.thought:
                    found.reasoning += piece.text
                else:
                    found.content += piece.text
                if piece.call is not None and piece.call.opening is not None:
                    assert piece.call.number == len(found.calls)
                    found.calls.append([piece.call.opening.name, ""])
                if piece.call is not None:
                    assert piece.call.number == len(found.calls) - 1
                    found.calls[-1][1] += piece.call.arguments
        return found

    def reads(self, text: str, sizes: Sequence[int] = (1,), **how: Any) -> Read:
        """What comes of a reply that the model itself ends."""
        end = self.tokenizer.eos_token_id
        return self.read(self.tokens(text), "stop", sizes, ended_by=end, **how)


def check_cuts(
    model: Model,
    text: str,
    sizes: Sequence[int],
    tags: Sequence[str],
    places: Sequence[float] | None = None,
) -> Read:
    """Cuts ``text`` by its length, by its client leaving and by a token of a client's.

    Args:
        places: where, as parts of its tokens; None: everywhere.

    Returns:
        What the whole of it says.
    """
    whole = model.reads(text, sizes)
    tokens = model.tokens(text)
    foreign = model.tokenizer.convert_tokens_to_ids("<|im_start|>")
    ends = [1 + int(place * len(tokens)) for place in places or ()]
    for end in range(1, len(tokens) + 1) if places is None else ends:
        for finish, ended_by in (("length", None), (None, None), ("stop", foreign)):
            cut = model.read(tokens[:end], finish, sizes, ended_by)
            where = (text, end, finish, cut)
            assert len(cut.calls) <= len(whole.calls), where
            for number, (name, arguments) in enumerate(cut.calls):
                assert name == whole.calls[number][0], where
                assert whole.calls[number][1].startswith(arguments), where
                if number + 1 < len(cut.calls):
                    assert arguments == whole.calls[number][1], where
            if finish == "stop":  # what may be the beginning of a tag is text then
                assert not any(tag in cut.content for tag in tags), where
                continue
            assert whole.reasoning.startswith(cut.reasoning.rstrip()), where
            # A character of several bytes may be cut, too.
            content = cut.content.rstrip().rstrip("\ufffd")
            assert whole.content.startswith(content), where
            if finish == "length" and not (cut.finish == "tool_calls" and cut == whole):
                assert cut.finish == "length", where
    return whole


# What all tests of cut calls vary: where the text is cut, and how it comes.
places = st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=6)
chunks = st.lists(st.integers(1, 12), min_size=1, max_size=4)
