"""Feeds a matcher the beginning of a text, so that what follows completes it."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer


def fitting_chars(matcher: LLMatcher, tokenizer: LLTokenizer, text: str) -> int:
    """Feeds ``text`` to a matcher; returns how many of its first characters the grammar allows.

    If it allows all, the matcher has consumed them. NOTE: a matcher follows bytes, so it does not
    matter how they are divided into tokens. The longest token at each place is the fastest way.
    """
    data = text.encode()
    tokens: list[int] = tokenizer.greedy_tokenize(text)
    taken = 0
    if tokenizer.decode_bytes(tokens) == data:  # the vocabulary has all bytes
        taken = len(tokenizer.decode_bytes(tokens[: matcher.try_consume_tokens(tokens)]))
    chars = len(data[:taken].decode(errors="ignore"))
    if taken > len(text[:chars].encode()):
        return chars  # within a character
    for char in text[chars:]:
        tokens = tokenizer.greedy_tokenize(char)
        known = tokenizer.decode_bytes(tokens) == char.encode()
        if not known or matcher.try_consume_tokens(tokens) < len(tokens):
            break
        chars += 1
    return chars
