"""What the processors of tiny models read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# mlx-vlm has the angles of 512 x 512 positions, and makes all of them for each image.
_FEW_POSITIONS = property(lambda _: 16, lambda _, value: None)
SMALL_ROPE = {f"vision.Rope2DPosEmb.max_{side}": _FEW_POSITIONS for side in ("height", "width")}


class ProcessorFiles(NamedTuple):
    """What a family's processor reads.

    Attributes:
        image: preprocessor_config.json.
        processor: processor_config.json; without values, the model has neither of both files.
        token: the token of which an image has several.
        mark: what a chat template writes for an image, with "{}" for its number.
        config: more values of config.json.
        parts: more values of its parts, as "vision_config".
        tokens: more special tokens, and the keys of config.json that have their ids.
        named: the ``model_type`` in config.json, if it is not the name of mlx-vlm's module.
        constants: as ``Tiny.constants``, for what a processor does not take from files; a text
            that is a token means its id.
        sizes: the widths and heights of the images that it is tried with.
        write: writes further files into the directory.
        tokenizer: more values of tokenizer_config.json.
        names: the keys of config.json that have the id of ``token``; or "part.key".
        attributes: of mlx-vlm's processor, for what it takes from no file.
    """

    image: dict[str, Any]
    processor: dict[str, Any]
    token: str
    mark: str
    config: Mapping[str, Any] = {}
    parts: Mapping[str, Mapping[str, Any]] = {}
    tokens: Mapping[str, str | None] = {}
    named: str | None = None
    constants: Mapping[str, Any] = {}
    sizes: tuple[tuple[int, int], ...] = ((40, 24), (20, 30), (16, 16), (64, 8))
    write: Callable[[Path], None] = lambda path: None
    tokenizer: Mapping[str, Any] = {}
    names: tuple[str, ...] = ("image_token_id", "image_token_index")
    attributes: Mapping[str, Any] = {}
