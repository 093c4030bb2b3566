"""The settings of speculative decoding, with vLLM's names."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_TOKENS = 64
# Without a configuration: grammars and predicted outputs propose tokens, too. A step with one row
# and this many tokens of a draft needs no padding (``cache.pages.page.step_size``).
DEFAULT_TOKENS = 31
MAX_LOOKUP = 64
# The least and the most tokens of a match, where neither is configured.
DEFAULT_LOOKUP = 2, 5


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are proposed; ``--speculative-config`` as JSON.

    Attributes:
        method: "ngram" looks for the sequence in the prefix cache, and for the last tokens earlier
            in the prompt and the output; "draft_model" asks a smaller model of the same vocabulary.
            None: "draft_model" with a ``model``, else "ngram".
        model: the draft model: a hub id, a directory or a ``.gguf`` file.
        num_speculative_tokens: maximum proposed tokens of a row in one step; fewer with many rows
            (``speculation.speculator``).
        prompt_lookup_min: how many last tokens have to be found, at least. None: 2, or
            ``prompt_lookup_max`` if that is less.
        prompt_lookup_max: a longer match counts no more than one of this many tokens. None: 5, or
            ``prompt_lookup_min`` if that is more.

    Raises:
        ValueError: a number is out of its range, or ``model`` does not fit ``method``.
    """

    method: Literal["ngram", "draft_model"] | None = None
    model: str | None = None
    num_speculative_tokens: int = DEFAULT_TOKENS
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        if self.method is not None and (self.method == "ngram") != self.looks_up:
            raise ValueError(f"method {self.method} needs {'a' if self.looks_up else 'no'} model")
        if not 1 <= self.num_speculative_tokens <= MAX_TOKENS:
            raise ValueError(
                f"num_speculative_tokens must be 1 to {MAX_TOKENS}, not "
                f"{self.num_speculative_tokens}"
            )
        shortest, longest = self.match_lengths
        if not 1 <= shortest <= longest <= MAX_LOOKUP:
            raise ValueError(
                f"prompt_lookup_min and prompt_lookup_max must be 1 to {MAX_LOOKUP}, the first not "
                f"above the second, not {shortest} and {longest}"
            )

    @property
    def looks_up(self) -> bool:
        """Whether the method is "ngram"."""
        return self.model is None

    @property
    def match_lengths(self) -> tuple[int, int]:
        """``prompt_lookup_min`` and ``prompt_lookup_max``."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if longest is None:
            longest = max(shortest or 0, DEFAULT_LOOKUP[1])
        return min(longest, DEFAULT_LOOKUP[0]) if shortest is None else shortest, longest


def parse_config(text: str | bytes) -> SpeculativeConfig:
    """Parses the settings from JSON.

    Raises:
        ValueError: it is no JSON, or a key or value is wrong; the message is one line.
    """
    try:
        return msgspec.json.decode(text, type=SpeculativeConfig)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def draft_tokens(config: SpeculativeConfig | None) -> int:
    """The maximum number of proposed tokens of a row in one step."""
    return DEFAULT_TOKENS if config is None else config.num_speculative_tokens
