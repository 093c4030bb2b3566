"""The settings of speculative decoding, with vLLM's names."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_TOKENS = 64
# Without a configuration: grammars and predicted outputs propose tokens, too.
DEFAULT_TOKENS = 8
MAX_LOOKUP = 64


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are proposed; ``--speculative-config`` as JSON.

    Attributes:
        method: "ngram" looks for the sequence in the prefix cache, and for the last tokens earlier
            in the prompt and the output; "draft_model" asks a smaller model of the same vocabulary.
        model: the draft model: a hub id, a directory or a ``.gguf`` file.
        num_speculative_tokens: maximum proposed tokens of a row in one step.
        prompt_lookup_min: how many last tokens have to be found, at least.
        prompt_lookup_max: a longer match counts no more than one of this many tokens.

    Raises:
        ValueError: a number is out of its range, or ``model`` does not fit ``method``.
    """

    method: Literal["ngram", "draft_model"] = "ngram"
    model: str | None = None
    num_speculative_tokens: int = DEFAULT_TOKENS
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5

    def __post_init__(self) -> None:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(f"method {self.method} needs {'no' if self.model else 'a'} model")
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
