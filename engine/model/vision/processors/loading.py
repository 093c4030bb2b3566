"""Loads the processor of a model's images. Runs in a worker process."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers.processors import Sequence as Sequential

from chairlift.engine.errors import ModelError
from chairlift.engine.model.vision.families import family_of
from chairlift.engine.model.vision.processors.contexts import pil_backend, remote_code, silenced
from chairlift.engine.model.vision.processors.counting import embedding_counter
from chairlift.engine.model.vision.processors.processing import processing_of
from chairlift.engine.model.vision.processors.processor import Processor, tokenizer_of

# The entries of a model's config that have the id of an image's token.
_ID_NAMES = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
    "img_context_token_id",
    "img_id",
    "im_patch_token",
)


def load_processor(folder: str, model_type: str, trust_remote_code: bool) -> Processor:
    """Loads the processor of a model in a folder.

    Raises:
        ModelError: it cannot be loaded, or its image token is unknown.
    """
    # NOTE: a worker shares the machine with the engine's device.
    mx.set_default_device(mx.Device(mx.DeviceType.cpu))
    processing = processing_of(model_type)
    try:
        # NOTE: this first. It makes transformers load mlx-vlm's processors, which need no torch.
        importlib.import_module(f"mlx_vlm.models.{model_type}")
        from mlx_vlm.utils import load_image_processor
        from transformers import AutoProcessor

        with pil_backend(processing.pil), remote_code(trust_remote_code), silenced():
            # NOTE: without this argument, mlx-vlm trusts the folder's code.
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
            if processing.pixels:
                processor.image_processor = load_image_processor(Path(folder))
    except Exception as error:  # transformers raises any of its parsers' exceptions
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{folder}: the image processor cannot be loaded: {reason}; "
            "with --text-only, the model is served without images"
        ) from error
    if processing.mark is None and not getattr(processor, "image_token", None):
        raise ModelError(f"{folder}: the image processor has no token for images")
    if "add_special_tokens" not in processing.settings:
        _add_no_tokens(tokenizer_of(processor))
    if processing.completes is not None:
        processing.completes(processor)
    image_id = _image_id(processor, folder, model_type)
    lengthens = family_of(model_type).tokens != "each"
    counter = embedding_counter(folder, model_type) if lengthens else None
    return Processor(processor, model_type, image_id, counter)


def _image_id(processor: Any, folder: str, model_type: str) -> int | None:
    """The token that stands for an embedding of an image; None if all have negative ids."""
    token = processing_of(model_type).token
    if isinstance(token, int):
        return None if token < 0 else token
    if token is not None:
        return _id_of(token, tokenizer_of(processor), folder)
    # The processors of InternVL know it by the tokenizer.
    if (known := getattr(processor, "img_context_token_id", None)) is not None:
        return int(known)
    config = json.loads((Path(folder) / "config.json").read_bytes())
    defaults = vars(importlib.import_module(f"mlx_vlm.models.{model_type}").ModelConfig)
    parts = (config, config.get("thinker_config") or {}, defaults)
    found = (part.get(name) for part in parts for name in _ID_NAMES)
    image_id = next((each for each in found if type(each) is int), None)
    if image_id is None:
        raise ModelError(f"{folder}/config.json: lacks 'image_token_id'")
    return image_id


def _id_of(token: str, tokenizer: Any, folder: str) -> int:
    known: int | None = tokenizer.convert_tokens_to_ids(token)
    unknown = getattr(tokenizer, "unk_token", None)
    is_other = token != unknown and known == getattr(tokenizer, "unk_token_id", None)
    if known is None or is_other:
        raise ModelError(f"{folder}: the tokenizer has no {token!r}")
    return known


def _add_no_tokens(tokenizer: Any) -> None:
    """Keeps a tokenizer from adding special tokens: a rendered chat template has all of them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.post_processor = Sequential([])
