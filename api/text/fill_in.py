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

# With these, models end the text in a gap, besides their end of a text: marks of what follows it in
# training, another file or padding.
_ENDS = (
    *("▁<EOT>", "<EOT>", "<|file_separator|>", "<filename>"),
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>"),
    *("<|file_sep|>", "<file_sep>"),
    *("<|repo_name|>", "<repo_name>", "<reponame>"),
)


class FillIn(NamedTuple):
    """The token ids that mark the parts of a prompt with a gap.

    Attributes:
        ends: those that end the text in the gap, besides the model's end of a text. They have no
            text.
    """

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]

    @classmethod
    def of_vocabulary(cls, vocabulary: Mapping[str, int]) -> FillIn | None:
        """The marks of the model with these tokens; None if it has none."""
        for marks in _MARKS:
            if all(mark in vocabulary for mark in marks):
                prefix, suffix, middle = (vocabulary[mark] for mark in marks)
                ends = {vocabulary[end] for end in _ENDS if end in vocabulary}
                return cls(prefix, suffix, middle, frozenset({prefix, suffix, middle} | ends))
        return None
