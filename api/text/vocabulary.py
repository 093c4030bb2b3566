"""The tokenizer as the API uses it: prompts to ids, ids to text, one token's own bytes."""

from __future__ import annotations

import asyncio
import inspect
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from chairlift.api.schemas.replies import TokenizerInfo
from chairlift.api.text.chat_format import ChatFormat, Passage, chat_format
from chairlift.api.text.limited import Limited, TookTooLong
from chairlift.api.text.splitter import Rules, rules
from chairlift.api.text.stream import Detokenizer
from chairlift.api.text.template import Rendering, with_text_arguments
from chairlift.api.text.tokenizing import load_tokenizer, token_ids
from chairlift.engine.errors import Overflow, PromptTooLong, RequestError
from chairlift.engine.grammar.checker import Checker
from chairlift.engine.grammar.language import has_backend, lexicon
from chairlift.engine.workers.job import Fixture, Job, TooExpensive
from chairlift.engine.workers.pool import Workers

# Tokenizing this many characters takes about as long as a step of a small model: longer texts
# are tokenized in a thread (the tokenizers library releases the GIL).
INLINE_CHARS = 20_000
# What the library makes of a text is up to 200 times its size: of longer ones it is made in a
# worker process, which may take so long.
THREAD_CHARS = 128 << 10
TOKENIZE_SECONDS = 6.0
# A template is the model's own code, and may be a bad one.
TEMPLATE_SECONDS = 5.0
# Holds the tags that may end a prompt.
TAIL_TOKENS = 16

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}

T = TypeVar("T")


class TokenText(NamedTuple):
    """One token on its own: its text, and its bytes (part of a character, perhaps)."""

    text: str
    bytes: list[int]


class Vocabulary:
    """Wraps mlx-lm's TokenizerWrapper ``tokenizer``; ``size`` is the model's number of ids.

    ``workers`` do what takes long: grammars, and the tokens of long texts.
    """

    def __init__(
        self, tokenizer: Any, size: int, workers: Workers, format: ChatFormat | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._workers = workers
        self.size = size
        self.format = format or chat_format(tokenizer)
        self.end_ids: tuple[int, ...] = tuple(sorted(tokenizer.eos_token_ids))
        # all_special_ids lists only those that have a role.
        roles = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        added = tokenizer.added_tokens_decoder.items()
        self._special = dict(roles) | {i: token.content for i, token in added if token.special}
        self.hidden_ids = frozenset(self._special).union(self.end_ids)
        # What is asked for by the request's own fields, or not at all.
        self._reserved = frozenset(
            inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        )
        self._known = len(tokenizer)
        self._longest = max(map(len, tokenizer.get_vocab()))
        self._rendering = Limited(TEMPLATE_SECONDS)
        self._texts: dict[int, TokenText] = {}
        # Written once: a tokenizer of 150,000 tokens keeps the interpreter for that.
        known = cache(partial(lexicon, tokenizer, size))
        self.grammars = Checker(known, workers)
        self._splitting = Fixture("tokenizers", lambda: (load_tokenizer, (known().tokenizer,)))
        # mlx-lm's detokenizers, and decode itself, trim the space that begins a text. Behind
        # this stand-in for the prompt a token's space is inside the text, and is kept.
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)
        self._before_chars = len(tokenizer.decode(self._before))

    async def encode(
        self, text: str, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """A text's token ids; ``param`` names its field.

        Raises:
            RequestError: that takes too long, or too much memory.
            QueueFull: too many long texts wait already.
        """
        chars = len(text)
        if chars > THREAD_CHARS and has_backend(self._tokenizer):
            job = Job(token_ids, (text, add_special_tokens), TOKENIZE_SECONDS, self._splitting)
            try:
                tokens: array[int] = await self._workers.run(job)
            except TooExpensive as error:
                raise RequestError(f"{param}: the text {error} to tokenize", param) from error
            return tokens.tolist()
        return await _off_loop(
            chars,
            lambda: list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)),
        )

    async def render(self, rendering: Rendering) -> list[int]:
        """The token ids of a conversation, by the model's chat template.

        Raises:
            RequestError: the model has no template, or it does not take these messages.
        """
        if not self._tokenizer.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", "messages")
        if taken := self._reserved.intersection(rendering.kwargs):
            raise RequestError(
                f"chat_template_kwargs: {min(taken)} is not the template's", "chat_template_kwargs"
            )
        try:
            text = await self._rendering.run(partial(self._render, rendering))
        except TookTooLong as error:
            raise RequestError(
                f"the model's chat template takes longer than {TEMPLATE_SECONDS:g} s for these "
                "messages",
                "messages",
            ) from error
        # NOTE: a template is the model's own code; what it raises can be of any type.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}", "messages"
            ) from error
        return await self.encode(text, add_special_tokens=False, param="messages")

    def _render(self, rendering: Rendering) -> str:
        ending = {"continue_final_message": True} if rendering.continues else {}
        apply = partial(
            self._tokenizer.apply_chat_template,
            tools=list(rendering.tools) or None,
            add_generation_prompt=rendering.opens,
            tokenize=False,
            **ending,
            **rendering.kwargs,
        )
        try:
            return apply(list(rendering.messages))  # type: ignore[no-any-return]
        except Exception:
            if not any("tool_calls" in message for message in rendering.messages):
                raise
            # Most templates want a call's arguments as an object, some as text.
            with suppress(Exception):
                return apply(with_text_arguments(rendering.messages))  # type: ignore[no-any-return]
            raise

    def tail(self, tokens: Sequence[int]) -> str:
        """The text of a prompt's last tokens, without blank space behind it."""
        return str(self._tokenizer.decode(tokens[-TAIL_TOKENS:])).rstrip()

    def rules(self, initial: str, passages: Iterable[Passage], show_special: bool) -> Rules:
        """How a reply's tokens are told apart."""
        return rules(initial, passages, self._special, frozenset(self.end_ids), show_special)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        known = [token for token in tokens if token < self._known]
        return await _off_loop(len(known) * 4, lambda: str(self._tokenizer.decode(known)))

    @property
    def roles(self) -> TokenizerInfo:
        """The special tokens that begin a text, end one, and pad."""
        tokenizer = self._tokenizer
        return TokenizerInfo(tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)

    def check_chars(self, chars: int, context: int, param: str) -> None:
        """Refuses, before it is tokenized, what is too long even if all tokens were the longest.

        Raises:
            PromptTooLong: so many characters are more than ``context`` tokens.
        """
        most = context * self._longest
        if chars > most:
            raise PromptTooLong(
                f"{param}: {chars} characters; this model's maximum context length is {context} "
                f"tokens, never more than {most} characters",
                Overflow(-(-chars // self._longest), context),
                param,
            )

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError, naming ``param``, for an id that the model does not have."""
        # The two are found faster than each is looked at.
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < self.size:
                raise RequestError(
                    f"{param}: token id {token} is not in the model's vocabulary of {self.size}",
                    param,
                )

    def detokenizer(self) -> Detokenizer:
        """A fresh streaming detokenizer that goes on from some text before."""
        detokenizer: Detokenizer = self._tokenizer.detokenizer
        for token in self._before:
            detokenizer.add_token(token)
        _ = detokenizer.last_segment
        return detokenizer

    def token_text(self, token: int) -> TokenText:
        """One token's text and bytes, as the logprobs show them."""
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = self._token_text(token)
        return known

    def _token_text(self, token: int) -> TokenText:
        if token >= self._known:  # the model's rows beyond its tokenizer's, made by padding
            return TokenText("", [])
        text = self._tokenizer.decode([*self._before, token])[self._before_chars :]
        if "\ufffd" not in text:
            return TokenText(text, list(text.encode()))
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if match := _BYTE_TOKEN.fullmatch(piece):
            raw = [int(match[1], 16)]
        elif all(char in _BYTE_OF_CHAR for char in piece):
            raw = [_BYTE_OF_CHAR[char] for char in piece]
        else:
            return TokenText(text, list(text.encode()))
        # OpenAI's way to show a token that is not whole characters.
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


async def _off_loop(chars: int, work: Callable[[], T]) -> T:
    """Runs ``work`` in a thread if there is enough of it to hold up everyone's streams."""
    return work() if chars <= INLINE_CHARS else await asyncio.to_thread(work)
