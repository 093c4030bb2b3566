"""The tokenizer as the API uses it: encodes prompts, decodes token ids, and renders templates."""

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
from transformers.utils import chat_template_utils

from chairlift.api.schemas.replies import TokenizerInfo
from chairlift.api.text.bounded_template import BoundedEnvironment
from chairlift.api.text.chat_format import ChatFormat, Transition, chat_format
from chairlift.api.text.fill_in import FillIn
from chairlift.api.text.harmony_splitter import HarmonyRules
from chairlift.api.text.inner_ids import puts_space, without_line_break
from chairlift.api.text.limited import TimeLimitedThreads, TookTooLong
from chairlift.api.text.splitter import Rules, rules
from chairlift.api.text.stream import Detokenizer
from chairlift.api.text.template import (
    Rendering,
    TemplateContent,
    with_text_arguments,
    with_text_parts,
)
from chairlift.api.text.tokenizing import load_tokenizer, token_ids
from chairlift.engine.errors import Overflow, PromptTooLong, RequestError
from chairlift.engine.grammar.checker import Checker
from chairlift.engine.grammar.language import has_backend, lexicon
from chairlift.engine.workers.job import Fixture, Job, TooExpensive
from chairlift.engine.workers.pool import Workers

# Tokenizing this many characters takes about as long as a step of a small model. Longer texts are
# tokenized in a thread (the tokenizers library releases the GIL).
INLINE_CHARS = 20_000
# The tokenizers library allocates up to 200 times the size of a text. Longer texts are tokenized in
# a worker process, with a time limit.
THREAD_CHARS = 128 << 10
TOKENIZE_SECONDS = 6.0
# A chat template is code that comes with the model, and may be slow or malicious.
TEMPLATE_SECONDS = 5.0
# Enough tokens to contain any tag that may end a prompt.
TAIL_TOKENS = 16
# A text that no template contains.
_TRIAL = "chairlift trial"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}

T = TypeVar("T")

# transformers renders chat templates in it.
chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


class TokenText(NamedTuple):
    """A single token's text and bytes, which may be part of a character."""

    text: str
    bytes: list[int]


class Vocabulary:
    """Wraps mlx-lm's tokenizer.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper.
        size: the model's number of token ids.
        workers: processes for slow work: compiling grammars and tokenizing long texts.
        format: the chat format; None means what mlx-lm derives.
    """

    def __init__(
        self, tokenizer: Any, size: int, workers: Workers, format: ChatFormat | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._workers = workers
        self.size = size
        self.format = format or chat_format(tokenizer)
        if self.format.harmony is not None:
            # Some converted models list only one of them.
            tokenizer.eos_token_ids = tokenizer.eos_token_ids | self.format.harmony.stops
        self.end_ids: tuple[int, ...] = tuple(sorted(tokenizer.eos_token_ids))
        # all_special_ids lists only special tokens with a role, like the end of a text.
        roles = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        added = tokenizer.added_tokens_decoder.items()
        self._special = dict(roles) | {i: token.content for i, token in added if token.special}
        self.hidden_ids = frozenset(self._special).union(self.end_ids)
        # Requests cannot set these in chat_template_kwargs: some have their own fields, others are
        # fixed. Templates know the conversation as "messages".
        self._reserved = frozenset(
            inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        ).union(["messages"])
        vocabulary = tokenizer.get_vocab()
        # More than its tokens, if some ids have none.
        self._known = max(vocabulary.values()) + 1
        self._longest = max(map(len, vocabulary))
        # Some models lack the tokens that were last added to their tokenizers.
        self._has_unknown = self._known > size
        # The marks of a prompt with a gap, or None for a model that fills none.
        self.fill_in = FillIn.of_vocabulary(vocabulary, self._special.values())
        self._rendering = TimeLimitedThreads(TEMPLATE_SECONDS)
        # Whether the template writes no texts but those in parts; None: not known yet.
        self._needs_parts: bool | None = None
        self._texts: dict[int, TokenText] = {}
        # Cached: serializing a tokenizer of 150,000 tokens blocks the interpreter.
        known = cache(partial(lexicon, tokenizer, size))
        self.grammars = Checker(known, workers)
        self._splitting = Fixture(lambda: (load_tokenizer, (known().tokenizer,)))
        # mlx-lm's detokenizers, and decode itself, strip the space at the beginning of a text.
        # After this stand-in for the prompt, a token's space is inside the text and is kept.
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)
        self._before_chars = len(tokenizer.decode(self._before))

    async def encode(
        self, text: str, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """The token ids of a text; ``param`` is the name of its field, for errors.

        Raises:
            RequestError: tokenizing takes too long or too much memory, or the text has a token that
                the model lacks.
            QueueFull: too many long texts are waiting.
        """
        tokens = await self._encode(text, add_special_tokens, param)
        if self._has_unknown:
            self.check_ids(tokens, param)
        return tokens

    async def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
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

    async def encode_rest(self, text: str, param: str) -> list[int]:
        """As ``inner_ids``, but raises as ``encode``."""
        if puts_space(self._tokenizer):
            ids = await self.encode("\n" + text, add_special_tokens=False, param=param)
            if (rest := without_line_break(self._tokenizer, ids)) is not None:
                return rest
        return await self.encode(text, add_special_tokens=False, param=param)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.has_chat_template)

    async def render(self, rendering: Rendering) -> list[int]:
        """The token ids of a conversation, rendered with the model's chat template.

        Raises:
            RequestError: the model has no template, or it refuses these messages.
        """
        text = await self.render_text(rendering)
        return await self.encode(text, add_special_tokens=False, param="messages")

    async def render_text(self, rendering: Rendering) -> str:
        """Renders a conversation with the model's chat template; raises as ``render``."""
        if not self.has_chat_template:
            raise RequestError("this model has no chat template: use /v1/completions", "messages")
        if reserved := self._reserved.intersection(rendering.kwargs):
            raise RequestError(
                f"chat_template_kwargs: must not contain {min(reserved)}",
                "chat_template_kwargs",
            )
        try:
            return await self._rendering.run(partial(self._render, rendering))
        except TookTooLong as error:
            raise RequestError(
                f"the model's chat template takes longer than {TEMPLATE_SECONDS:g} s, or too much "
                "memory, for these messages",
                "messages",
            ) from error
        # NOTE: a template is code that comes with the model and can raise anything.
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}", "messages"
            ) from error

    def _render(self, rendering: Rendering) -> str:
        if self._needs_parts is None:
            parts: TemplateContent = [{"type": "text", "text": _TRIAL}]
            self._needs_parts = not self._writes(_TRIAL) and self._writes(parts)
        messages = rendering.messages
        if self._needs_parts:
            messages = with_text_parts(messages)
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
            return apply(list(messages))  # type: ignore[no-any-return]
        except Exception:
            if not any("tool_calls" in message for message in messages):
                raise
            # Most templates expect a call's arguments as an object, some as text.
            with suppress(Exception):
                return apply(with_text_arguments(messages))  # type: ignore[no-any-return]
            raise

    def _writes(self, content: TemplateContent) -> bool:
        """Whether the template writes the text of a content in this form."""
        with suppress(Exception):
            trial = [{"role": "user", "content": content}]
            text = self._tokenizer.apply_chat_template(
                trial, add_generation_prompt=True, tokenize=False
            )
            return _TRIAL in text
        return False

    def tail(self, tokens: Sequence[int]) -> str:
        """The text of a prompt's last tokens, without trailing white space."""
        return str(self._tokenizer.decode(tokens[-TAIL_TOKENS:])).rstrip()

    def rules(self, initial: str, transitions: Iterable[Transition], show_special: bool) -> Rules:
        """The rules that split a reply into text, thoughts and calls; see ``splitter.rules``."""
        return rules(initial, transitions, self._special, frozenset(self.end_ids), show_special)

    def harmony_rules(self, initial: str, show_special: bool) -> HarmonyRules | None:
        """The rules that split a reply in gpt-oss's format; None for another model."""
        tokens = self.format.harmony
        if tokens is None:
            return None
        hidden = frozenset() if show_special else self.hidden_ids.difference(tokens.texts)
        return HarmonyRules(initial, hidden, frozenset(self.end_ids), tokens)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, including special tokens."""
        known = [token for token in tokens if token < self._known]
        return await _off_loop(len(known) * 4, lambda: str(self._tokenizer.decode(known)))

    @property
    def roles(self) -> TokenizerInfo:
        """The special tokens that begin a text, end a text, and pad."""
        tokenizer = self._tokenizer
        return TokenizerInfo(tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)

    def check_chars(self, chars: int, context: int, param: str) -> None:
        """Refuses a text that could not fit the context even if all its tokens were the longest.

        It is cheap, because it does not tokenize.

        Raises:
            PromptTooLong: ``chars`` characters are certainly more than ``context`` tokens.
        """
        max_chars = context * self._longest
        if chars > max_chars:
            raise PromptTooLong(
                f"{param}: {chars} characters; this model's maximum context length is {context} "
                f"tokens, never more than {max_chars} characters",
                Overflow(-(-chars // self._longest), context),
                param,
            )

    def beginning(self, text: str, context: int) -> str:
        """The longest beginning of ``text`` that ``check_chars`` takes.

        It contains the first ``context`` tokens of the text.
        """
        return text[: context * self._longest]

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Raises RequestError, naming ``param``, for an id outside of the vocabulary."""
        # Checking min and max is faster than a loop over all ids.
        for token in (min(tokens), max(tokens)) if tokens else ():
            if not 0 <= token < self.size:
                raise RequestError(
                    f"{param}: token id {token} is not in the model's vocabulary of {self.size}",
                    param,
                )

    def detokenizer(self) -> Detokenizer:
        """A fresh streaming detokenizer in the state after some text, so that a space is kept."""
        detokenizer: Detokenizer = self._tokenizer.detokenizer
        for token in self._before:
            detokenizer.add_token(token)
        _ = detokenizer.last_segment
        return detokenizer

    def token_text(self, token: int) -> TokenText:
        """One token's text and bytes, as log-probabilities show them."""
        known = self._texts.get(token)
        if known is None:
            known = self._texts[token] = self._token_text(token)
        return known

    def _token_text(self, token: int) -> TokenText:
        if token >= self._known:  # the model pads its vocabulary beyond the tokenizer's
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
        # OpenAI's notation for a token that is not made of complete characters.
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


async def _off_loop(chars: int, work: Callable[[], T]) -> T:
    """Runs ``work``, in a thread if ``chars`` are so many that it would delay streams."""
    return work() if chars <= INLINE_CHARS else await asyncio.to_thread(work)
