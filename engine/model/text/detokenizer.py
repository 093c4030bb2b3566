"""Converts tokens to text one at a time; all segments together are the text of ``decode``.

mlx-lm's byte-level detokenizer drops a leading space, and its SentencePiece detokenizer depends on
where a line begins. Tokens of both kinds stand for bytes, so one UTF-8 decoder serves both. For
other kinds, mlx-lm decodes each line on its own, which drops the space at its beginning, and again
from the start of the line for each token, which repeats text that was incomplete in between.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode


class _SegmentedText:
    """The text of a detokenizer, and its part since the last reading.

    Attributes:
        overdue: the characters between the text before the last token and the token's own: U+FFFD
            for bytes of earlier tokens, which the token does not continue.
    """

    def reset(self) -> None:
        """Starts a new text."""
        self.overdue = 0
        self.tokens: list[int] = []
        self._segments: list[str] = []
        self._read = 0

    @property
    def text(self) -> str:
        """The complete text so far."""
        return "".join(self._segments)

    @property
    def last_segment(self) -> str:
        """The text that was added since this property was last read."""
        new = "".join(self._segments[self._read :])
        self._read = len(self._segments)
        return new


class ByteDetokenizer(_SegmentedText):
    """Implements mlx-lm's StreamingDetokenizer, in time linear in the tokens.

    An invalid byte becomes U+FFFD as soon as no later byte can complete a character.

    Args:
        token_bytes: the bytes of each token id.
        strip: whether to drop one leading space of the text.
    """

    def __init__(self, token_bytes: list[bytes], strip: bool) -> None:
        self._token_bytes = token_bytes
        # The texts of tokens that are whole characters, as far as they have been needed. Copies of
        # the detokenizer share them.
        self._texts: dict[int, str] = {}
        self._strip = strip
        self.reset()

    def reset(self) -> None:
        """Starts a new text."""
        super().reset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Whether the decoder has a part of a character.
        self._partial = False
        self._at_start = True

    def add_token(self, token: int) -> None:
        """Adds the next token. An id outside the vocabulary has no text, as in ``decode``."""
        self.tokens.append(token)
        self.overdue = 0
        text = None if self._partial else self._texts.get(token)
        self._append(self._decode(token) if text is None else text)

    @property
    def waiting(self) -> int:
        """The number of characters that ``finalize`` would add."""
        return len(self._decoder.getstate()[0].decode(errors="replace"))

    def finalize(self) -> None:
        """Ends the text: an incomplete character becomes U+FFFD."""
        self._append(self._decoder.decode(b"", final=True))
        self._partial = False

    def _decode(self, token: int) -> str:
        """The characters that a token completes."""
        if not 0 <= token < len(self._token_bytes):
            return ""
        alone = not self._partial
        data = self._token_bytes[token]
        if not alone and data:
            # All characters but that of the token's first byte.
            joint = self._decoder.getstate()[0] + data[:1]
            self.overdue = len(joint.decode(errors="replace")) - 1
        text = self._decoder.decode(data)
        self._partial = bool(self._decoder.getstate()[0])
        if alone and not self._partial:
            self._texts[token] = text
        return text

    def _append(self, text: str) -> None:
        if text and self._at_start:
            self._at_start = False
            if self._strip:
                text = text.removeprefix(" ")
        if text:
            self._segments.append(text)


class ContextDetokenizer(_SegmentedText):
    """Implements mlx-lm's StreamingDetokenizer for any tokenizer.

    It decodes new tokens behind those of the last segment, so that they are not at the beginning of
    a text, where decoders drop a space.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = num_ids(tokenizer)
        self.reset()

    def reset(self) -> None:
        """Starts a new text."""
        super().reset()
        # The tokens of the last segment, and how much of their own text they have.
        self._context: list[int] = []
        self._context_chars = 0
        # The tokens after them, which have no text yet.
        self._pending: list[int] = []

    def add_token(self, token: int) -> None:
        """Adds the next token. An id outside the vocabulary has no text, as in ``decode``."""
        self.tokens.append(token)
        self.overdue = 0
        if not 0 <= token < self._known:
            return
        before = self._pending_text()
        self._pending.append(token)
        text = self._tokenizer.decode([*self._context, *self._pending])
        is_whole = not text.endswith("\ufffd") or len(self._pending) >= _MAX_PENDING
        if is_whole and len(text) > self._context_chars:
            self.overdue = len(before) if text.startswith(before, self._context_chars) else 0
            self._append(text)

    @property
    def waiting(self) -> int:
        """The number of characters that ``finalize`` would add."""
        return len(self._pending_text())

    def finalize(self) -> None:
        """Ends the text: an incomplete character becomes U+FFFD."""
        if self._pending:
            self._append(self._tokenizer.decode([*self._context, *self._pending]))

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        return str(self._tokenizer.decode([*self._context, *self._pending]))[self._context_chars :]

    def _append(self, text: str) -> None:
        self._segments.append(text[self._context_chars :])
        self._context, self._pending = self._pending, []
        self._context_chars = len(self._tokenizer.decode(self._context))


# A character has at most four bytes, so this many tokens are not the beginning of one.
_MAX_PENDING = 8


def num_ids(tokenizer: Any) -> int:
    """The number of ids of a tokenizer, which may exceed its tokens: some ids have no token."""
    highest: int = max(tokenizer.get_vocab().values())
    return highest + 1


def detokenizer_of(tokenizer: Any) -> ByteDetokenizer | ContextDetokenizer:
    """The detokenizer for a transformers tokenizer."""
    return byte_detokenizer(tokenizer) or ContextDetokenizer(tokenizer)


def byte_detokenizer(tokenizer: Any) -> ByteDetokenizer | None:
    """A detokenizer for a transformers tokenizer; None if its decoder is of an unknown kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    to_bytes: Callable[[str], bytes]
    if kinds == ["ByteLevel"]:
        to_bytes = _byte_level
    elif (
        kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"])
        and steps[0]["pattern"] == {"String": "▁"}
        and steps[0]["content"] == " "
        and (steps[3:] or [_STRIP_ONE]) == [_STRIP_ONE]
    ):
        to_bytes = _sentencepiece
    else:
        return None
    tokens = tokenizer.convert_ids_to_tokens(list(range(num_ids(tokenizer))))
    return ByteDetokenizer([to_bytes(t) if t else b"" for t in tokens], "Strip" in kinds)


_STRIP_ONE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # an added token that is plain text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()
