"""The files of a processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ProcessorFiles(NamedTuple):
    """What a family's processor reads.

    Attributes:
        image: preprocessor_config.json.
        processor: processor_config.json.
        token: the token of which an image has several.
        mark: what a chat template writes for an image.
        config: more values of config.json, and of its parts.
        tokens: more special tokens.
        tokenizer: more values of tokenizer_config.json.
        names: the keys of config.json that have the id of ``token``; or "part.key".
        attributes: of mlx-vlm's processor, for what it takes from no file.
    """

    image: dict[str, Any]
    processor: dict[str, Any]
    token: str
    mark: str
    config: Mapping[str, Any] = {}
    tokens: Mapping[str, str | None] = {}
    tokenizer: Mapping[str, Any] = {}
    names: tuple[str, ...] = ("image_token_id", "image_token_index")
    attributes: Mapping[str, Any] = {}
