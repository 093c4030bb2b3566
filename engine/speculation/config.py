"""The settings of speculative decoding, with vLLM's names."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_TOKENS = 64
MAX_LOOKUP = 64


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are proposed; ``--speculative-config`` as JSON.

    Attributes:
        method: "ngram" looks for the last tokens earlier in the prompt and the output.
        num_speculative_tokens: maximum proposed tokens of a row in one step.
        prompt_lookup_min: how many last tokens have to be found, at least.
        prompt_lookup_max: a longer match counts no more than one of so many tokens.

    Raises:
        ValueError: a number is out of its range.
    """

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_TOKENS:
            raise ValueError(
                f"num_speculative_tokens must be 1 to {MAX_TOKENS}, not "
                f"{self.num_speculative_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP:
            raise ValueError(
                f"prompt_lookup_min and prompt_lookup_max must be 1 to {MAX_LOOKUP}, the first not "
                f"above the second, not {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )
