"""Reads a reply that is truncated at any token, as the API reads a model's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.api.api_server import MESSAGES, tool

from chairlift.api.chat.choice import DialogueChoice, ReplySyntax
from chairlift.api.chat.prepare import reply_syntax
from chairlift.api.chat.tool_plan import tool_plan
from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.text.chat_format import ThinkTags, chat_format
from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.messages import TokenLogprobs, TokenOutput
from chairlift.engine.workers.pool import Workers

FUNCTION = tool(
    "f",
    {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "o": {"type": "object"},
        },
    },
)
OTHER = tool("g")
PROPERTY = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@dataclass
class ParsedReply:
    """A choice as its client receives it.

    Attributes:
        calls: name and arguments of each call.
        finish: the finish reason.
        scored: the number of tokens that have log-probabilities.
    """

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
    """The server's settings for reading a reply of ``model``."""
    words = vocabulary(model.tokenizer, model.tags)
    request = ChatRequest.model_validate(
        {"messages": MESSAGES, "tools": [FUNCTION, OTHER], **dict(model.fields)}
    )
    settings = reply_syntax(request, words, tool_plan(request, words.format), thinks=False)
    assert settings is not None
    return settings


@dataclass(frozen=True)
class Model:
    """A model, and a request to it.

    Attributes:
        fields: further fields of the request, which offers FUNCTION and OTHER.
        tags: those around a thought, if the model thinks.
    """

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
    ) -> ParsedReply:
        """Reads a reply.

        Args:
            tokens: the reply's tokens.
            finish: the engine's finish reason; None if the client leaves.
            sizes: the numbers of tokens that arrive at a time, repeated in turn.
            ended_by: the token that ended the reply, if one did.
            logprobs: whether the request asks for log-probabilities.
        """
        detokenizer = vocabulary(self.tokenizer, self.tags).detokenizer
        choice = DialogueChoice(0, reading(self), detokenizer, StopMatcher(Stops([])), logprobs)
        reply = ParsedReply()
        position, turn = 0, 0
        all_tokens = [*tokens, *([] if ended_by is None else [ended_by])]
        while reply.finish is None and (position < len(all_tokens) or (turn == 0 and finish)):
            size = sizes[turn % len(sizes)]
            turn += 1
            part = all_tokens[position : position + size]
            position += size
            last = finish if position >= len(all_tokens) else None
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
                reply.scored += len(piece.scored or ())
                reply.finish = piece.finish
                if piece.thought:
                    reply.reasoning += piece.text
                else:
                    reply.content += piece.text
                if piece.call is not None and piece.call.opening is not None:
                    assert piece.call.number == len(reply.calls)
                    reply.calls.append([piece.call.opening.name, ""])
                if piece.call is not None:
                    assert piece.call.number == len(reply.calls) - 1
                    reply.calls[-1][1] += piece.call.arguments
        return reply

    def read_complete(self, text: str, sizes: Sequence[int] = (1,), **options: Any) -> ParsedReply:
        """Reads a reply that ends with the end token; ``options`` are those of ``read``."""
        end = self.tokenizer.eos_token_id
        return self.read(self.tokens(text), "stop", sizes, ended_by=end, **options)


def check_truncations(
    model: Model,
    text: str,
    sizes: Sequence[int],
    tags: Sequence[str],
    positions: Sequence[float] | None = None,
) -> ParsedReply:
    """Checks that a truncated reply is the beginning of the complete one.

    At each position, the reply is ended by the length, by the client leaving, and by one of the
    request's stop tokens.

    Args:
        model: reads the reply.
        text: the complete reply.
        sizes: the numbers of tokens that arrive at a time, repeated in turn.
        tags: texts that must not appear in the content.
        positions: where to truncate, as fractions of the number of tokens; None: everywhere.

    Returns:
        The complete reply.
    """
    complete = model.read_complete(text, sizes)
    tokens = model.tokens(text)
    foreign = model.tokenizer.convert_tokens_to_ids("<|im_start|>")
    ends = [1 + int(position * len(tokens)) for position in positions or ()]
    for end in range(1, len(tokens) + 1) if positions is None else ends:
        for finish, ended_by in (("length", None), (None, None), ("stop", foreign)):
            cut = model.read(tokens[:end], finish, sizes, ended_by)
            where = (text, end, finish, cut)
            assert len(cut.calls) <= len(complete.calls), where
            for number, (name, arguments) in enumerate(cut.calls):
                assert name == complete.calls[number][0], where
                assert complete.calls[number][1].startswith(arguments), where
                if number + 1 < len(cut.calls):
                    assert arguments == complete.calls[number][1], where
            if finish == "stop":  # the beginning of a tag is text then
                assert not any(tag in cut.content for tag in tags), where
                continue
            assert complete.reasoning.startswith(cut.reasoning.rstrip()), where
            # A character of several bytes may be truncated, too.
            content = cut.content.rstrip().rstrip("\ufffd")
            assert complete.content.startswith(content), where
            if finish == "length" and not (cut.finish == "tool_calls" and cut == complete):
                assert cut.finish == "length", where
    return complete


# Strategies: where a reply is truncated, and how many tokens arrive at a time.
cut_positions = st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=6)
chunk_sizes = st.lists(st.integers(1, 12), min_size=1, max_size=4)
