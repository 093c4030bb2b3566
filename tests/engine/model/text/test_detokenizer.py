"""The detokenizer remembers the texts of tokens, and still joins characters that are split."""

from __future__ import annotations

from copy import copy

from chairlift.engine.model.text.detokenizer import ByteDetokenizer

# The bytes of the euro sign are E2 82 AC.
TOKENS = [b" a", b"\xe2", b"\x82\xac", b"\xe2\x82\xac", b"\xac", b""]


def text(detokenizer: ByteDetokenizer, tokens: list[int]) -> str:
    detokenizer.reset()
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return detokenizer.text


def test_tokens_have_the_same_text_when_they_come_again() -> None:
    detokenizer = ByteDetokenizer(TOKENS, strip=True)
    every = [0, 1, 2, 3, 4, 1, 0, 5, 2, 9, 3, 1]
    for tokens in (every, every[::-1], [0, 1, 0, 4, 1, 2], [1, 5, 2], [4, 4, 1, 4]):
        expected = b"".join(TOKENS[t] for t in tokens if t < len(TOKENS)).decode(errors="replace")
        assert text(copy(detokenizer), tokens) == expected.removeprefix(" ")
        assert text(detokenizer, tokens) == expected.removeprefix(" ")
