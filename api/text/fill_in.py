"""Prompts of models that fill the gap between two texts, as editors ask for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from chairlift.engine.errors import RequestError

if TYPE_CHECKING:
    from chairlift.api.text.vocabulary import Vocabulary

# Names of special tokens in one text, each of which takes another call of the tokenizer.
MAX_NAMES = 1000

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
        control: matches the names of tokens that are not text, like these marks.
    """

    prefix: int
    suffix: int
    middle: int
    ends: frozenset[int]
    control: re.Pattern[str]

    @classmethod
    def of_vocabulary(
        cls, vocabulary: Mapping[str, int], special: Iterable[str] = ()
    ) -> FillIn | None:
        """The marks of the model with these tokens, some of them special; None if it has none."""
        for marks in _MARKS:
            if all(mark in vocabulary for mark in marks):
                prefix, suffix, middle = (vocabulary[mark] for mark in marks)
                names = [*marks, *(end for end in _ENDS if end in vocabulary)]
                ends = frozenset(vocabulary[name] for name in names)
                longest_first = sorted({*names, *special}, key=len, reverse=True)
                control = re.compile("|".join(map(re.escape, longest_first)))
                return cls(prefix, suffix, middle, ends, control)
        return None

    def pieces(self, text: str, param: str) -> list[str]:
        """A text in pieces none of which has the name of a token that is not text.

        A tokenizer takes such a name for the token, wherever it is: also in a program's string.

        Raises:
            RequestError: the text has too many names.
        """
        cuts = [match.start() + 1 for match in self.control.finditer(text)]
        if len(cuts) > MAX_NAMES:
            raise RequestError(
                f"{param}: {len(cuts)} names of special tokens, more than {MAX_NAMES}", param
            )
        return [text[a:b] for a, b in pairwise((0, *cuts, len(text)))]


async def fill_in_prompt(
    vocabulary: Vocabulary, before: str, after: str, param: str, begun: str = ""
) -> list[int]:
    """The token ids of a prompt after which the model writes what is between two texts.

    Args:
        param: the name of the texts' field, for errors.
        begun: the beginning of what the model writes.

    Raises:
        RequestError: the model has no tokens for that, or a text is too expensive to tokenize.
    """
    marks = vocabulary.fill_in
    if marks is None:
        raise RequestError(
            f"{param} is not supported: this model has no tokens to fill in text", param
        )
    # Tokens that begin every text, like BOS, begin this prompt, too.
    prompt = [*await vocabulary.encode("", param=param), marks.prefix]
    first, *others = marks.pieces(before, param)
    prompt += await vocabulary.encode(first, add_special_tokens=False, param=param)
    for mark, pieces in (
        (None, others),
        (marks.suffix, marks.pieces(after, param)),
        (marks.middle, marks.pieces(begun, param)),
    ):
        prompt += [] if mark is None else [mark]
        for piece in pieces:
            prompt += await vocabulary.encode_rest(piece, param)
            await asyncio.sleep(0)  # streams go on between many pieces
    return prompt
