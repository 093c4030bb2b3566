"""Turns a text with images into token ids and arrays of pixels. Runs in a worker process."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from tokenizers.processors import Sequence as Sequential

from chairlift.engine.errors import ModelError, RequestError
from chairlift.engine.messages import Array, ImagePrompt, ImageSource, PromptImage
from chairlift.engine.model.vision.decoding import decode
from chairlift.engine.model.vision.marks import Mark
from chairlift.engine.model.vision.processing import Processing, processing_of

# What processors return besides the arrays of images.
_OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
)
# The entries of a model's config that have the id of an image's token.
_ID_NAMES = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
    "img_context_token_id",
)


class Processor:
    """The processor of one model.

    Args:
        processor: mlx-vlm's.
        image_id: the token of which an image has one for each of its embeddings.
        processing: how it is called.

    Attributes:
        mark: what stands for an image in a text.
    """

    def __init__(self, processor: Any, image_id: int, processing: Processing) -> None:
        self._processor = processor
        self._image_id = image_id
        # What stands for an embedding in a text.
        self._token = processor.tokenizer.convert_ids_to_tokens(image_id)
        self._processing = processing
        self.mark = _mark(processor, processing)

    def prepare(self, text: str, images: Sequence[Image.Image]) -> ImagePrompt:
        """The tokens of a text, in which each mark became the tokens of one image.

        Raises:
            RequestError: the text has another number of marks, or more images than mlx-vlm takes,
                or the processor refuses it.
        """
        self._check(text, len(images))
        whole = self._processed(text, images)
        tokens = _ids(whole)
        places = [place for place, token in enumerate(tokens) if token == self._image_id]
        prepared, start = [], 0
        for image in images:
            alone = whole if len(images) == 1 else self._processed(self.mark.numbered(1), [image])
            arrays = {name: _array(v) for name, v in alone.items() if name not in _OF_TEXT}
            stop = start + _ids(alone).count(self._image_id)
            prepared.append(PromptImage(_digest(arrays), places[start:stop], arrays))
            start = stop
        if start != len(places) or not all(image.places for image in prepared):
            raise RequestError(
                f"messages: the model's processor makes {len(places)} image tokens of these "
                f"images together and {start} of each alone",
                "messages",
            )
        return ImagePrompt(tokens, tuple(prepared))

    def _check(self, text: str, images: int) -> None:
        most = self._processing.most
        if most is not None and images > most:
            raise RequestError(
                f"messages: a prompt of this model has at most {most} image{'s' * (most > 1)}",
                "messages",
            )
        marks = self.mark.count(text)
        if marks != images or not self.mark.are_in_order(text):
            raise RequestError(
                f"messages: the prompt has {marks} places for {images} images; a text must "
                f"not contain {self.mark.numbered(1)!r}, and the model's chat template has to "
                "place each image",
                "messages",
            )
        if self._token is not None and self._token in self.mark.removed(text):
            raise RequestError(f"messages: a text must not contain {self._token!r}", "messages")

    def _processed(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        try:
            settings = self._processing.settings
            return dict(self._processor(text=[text], images=list(images), **settings))
        except Exception as error:  # it may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RequestError(
                f"messages: the model's processor refuses the images: {reason}", "messages"
            ) from error


def _mark(processor: Any, processing: Processing) -> Mark:
    text = processing.mark or processor.image_token
    alternatives = [re.escape(each) for each in (text, processing.other_mark) if each]
    return Mark(text, processing.pattern or "|".join(alternatives), text)


def load_processor(folder: str, model_type: str, trust_remote_code: bool) -> Processor:
    """Loads the processor of a model in a folder.

    Raises:
        ModelError: it cannot be loaded, or its image token is unknown.
    """
    # NOTE: a worker shares the machine with the engine's device.
    mx.set_default_device(mx.Device(mx.DeviceType.cpu))
    try:
        # NOTE: this first. It makes transformers load mlx-vlm's processors, which need no torch.
        package = importlib.import_module(f"mlx_vlm.models.{model_type}")
        from transformers import AutoProcessor

        # NOTE: without this argument, mlx-vlm trusts the folder's code.
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises any of its parsers' exceptions
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{folder}: the image processor cannot be loaded: {reason}; "
            "with --text-only, the model is served without images"
        ) from error
    image_id = _image_id(json.loads((Path(folder) / "config.json").read_bytes()), package)
    # The processors of InternVL know it by the tokenizer.
    image_id = getattr(processor, "img_context_token_id", image_id)
    if image_id is None:
        raise ModelError(f"{folder}/config.json: lacks 'image_token_id'")
    processing = processing_of(model_type)
    if not processing.mark and not getattr(processor, "image_token", None):
        raise ModelError(f"{folder}: the image processor has no token for images")
    if "add_special_tokens" not in processing.settings:
        _add_no_tokens(processor.tokenizer)
    if processing.completes is not None:
        processing.completes(processor)
    return Processor(processor, image_id, processing)


def _add_no_tokens(tokenizer: Any) -> None:
    """Keeps a tokenizer from adding special tokens: a rendered chat template has all of them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.post_processor = Sequential([])


def _image_id(config: Mapping[str, Any], package: Any) -> int | None:
    """The token of an image's embeddings by a model's config, or mlx-vlm's default."""
    parts = (config, config.get("thinker_config") or {}, vars(package.ModelConfig))
    known = (part.get(name) for part in parts for name in _ID_NAMES)
    return next((each for each in known if type(each) is int), None)


def mark_of(processor: Processor) -> Mark:
    """What stands for an image in a text."""
    return processor.mark


def prepare(processor: Processor, text: str, sources: Sequence[ImageSource]) -> ImagePrompt:
    """Decodes the images of a text and prepares them.

    Raises:
        RequestError: an image cannot be decoded; see ``decode`` and ``Processor.prepare``.
    """
    images = [
        decode(source.data, source.media_type, source.detail, f"image {number}")
        for number, source in enumerate(sources, 1)
    ]
    return processor.prepare(text, images)


def _ids(inputs: dict[str, Any]) -> list[int]:
    ids = np.asarray(inputs["input_ids"])
    return [int(token) for token in (ids[0] if ids.ndim == 2 else ids)]


def _array(value: Any) -> Array:
    array = np.ascontiguousarray(np.asarray(value))
    if array.dtype == object:
        raise RequestError("messages: the images have no common size", "messages")
    if array.dtype == np.float64:  # which MLX makes float32, too
        array = array.astype(np.float32)
    return Array(str(array.dtype), array.shape, array.tobytes())


def _digest(arrays: dict[str, Array]) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype, array.shape)).encode())
        digest.update(array.data)
    return digest.digest()
