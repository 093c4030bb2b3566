"""Prompts of models that fill the gap between two texts, as editors ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# The tokens before the text, before the suffix, and before the gap, as families of models name
# them. Some mark the gap's place instead, with the same order.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


class FillIn(NamedTuple):
    """The token ids that mark the parts of a prompt with a gap."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of_vocabulary(cls, vocabulary: Mapping[str, int]) -> FillIn | None:
        """The marks of the model with these tokens; None if it has none."""
        for marks in _MARKS:
            ids = [vocabulary.get(mark) for mark in marks]
            if None not in ids:
                return cls(*(id for id in ids if id is not None))
        return None
