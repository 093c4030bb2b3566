"""Turns a text with images into token ids and arrays of pixels. Runs in a worker process."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from tokenizers.processors import Sequence as Sequential

from chairlift.engine.errors import ModelError, RequestError
from chairlift.engine.messages import Array, ImagePrompt, ImageSource, PromptImage
from chairlift.engine.model.vision.counting import (
    EmbeddingCounter,
    embedding_counter,
    parsed_config,
)
from chairlift.engine.model.vision.decoding import decode
from chairlift.engine.model.vision.families import family_of
from chairlift.engine.model.vision.image_inputs import parts_of
from chairlift.engine.model.vision.processing import Processing, processing_of

# What processors return besides the arrays of images.
_OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels"}
)
_IMAGE_KEYS = ("image_token_id", "image_token_index")


@dataclass(frozen=True, slots=True)
class _Alone:
    """An image as the processor makes it alone.

    Attributes:
        tokens: how many tokens it has there.
        embeddings: how many it has in the engine: one for each of its embeddings.
    """

    arrays: dict[str, Array]
    tokens: int
    embeddings: int


class Processor:
    """The processor of one model.

    Args:
        processor: mlx-vlm's.
        image_id: the token of which an image has one or more.
        processing: how it is called.
        counter: counts embeddings; None: an image has one for each of its tokens.

    Attributes:
        mark: what stands for an image in a text.
    """

    def __init__(
        self,
        processor: Any,
        image_id: int,
        processing: Processing,
        counter: EmbeddingCounter | None = None,
    ) -> None:
        self._processor = processor
        self._image_id = image_id
        self._processing = processing
        self._counter = counter
        self.mark: str = processing.mark or processor.image_token

    def prepare(self, text: str, images: Sequence[Image.Image]) -> ImagePrompt:
        """The tokens of a text, in which each mark became the tokens of one image.

        Raises:
            RequestError: the text has another number of marks, or more images than mlx-vlm takes,
                or the processor refuses it.
        """
        self._check(text, len(images))
        whole = self._processed(text, images)
        alone = [self._alone(image, whole if len(images) == 1 else None) for image in images]
        tokens = _ids(whole)
        theirs, ours = tokens.count(self._image_id), sum(each.tokens for each in alone)
        if theirs != ours or not all(each.embeddings for each in alone):
            raise RequestError(
                f"messages: the model's processor makes {theirs} image tokens of these "
                f"images together and {ours} of each alone",
                "messages",
            )
        return self._placed(tokens, alone)

    def _check(self, text: str, images: int) -> None:
        most, other = self._processing.most, self._processing.other_mark
        if most is not None and images > most:
            raise RequestError(
                f"messages: this model takes at most {most} image in a conversation, not {images}",
                "messages",
            )
        marks = text.count(self.mark) + (0 if other is None else text.count(other))
        if marks != images:
            raise RequestError(
                f"messages: the prompt has {marks} places for {images} images; a text must "
                f"not contain {self.mark!r}, and the model's chat template has to place each image",
                "messages",
            )

    def _alone(self, image: Image.Image, inputs: dict[str, Any] | None) -> _Alone:
        """An image alone; ``inputs`` are those of a prompt that has no other."""
        inputs = self._processed(self.mark, [image]) if inputs is None else inputs
        ids = _ids(inputs)
        tokens = ids.count(self._image_id)
        first = ids.index(self._image_id) if tokens else 0
        arrays = {n: _array(value) for n, value in self._pixels(inputs, first).items()}
        if self._counter is None:
            return _Alone(arrays, tokens, tokens)
        with _refusals():
            return _Alone(arrays, tokens, self._counter.count(arrays, tokens))

    def _pixels(self, inputs: dict[str, Any], first: int) -> dict[str, Any]:
        """What the processor made of one image, whose first token is at the place ``first``."""
        processing = self._processing
        if processing.records:
            return parts_of(inputs["pixel_values"][0][0])
        kept = {
            name: value
            for name, value in inputs.items()
            if (name not in _OF_TEXT if processing.arrays is None else name in processing.arrays)
        }
        if processing.numbering is not None:
            kept[processing.numbering] = np.asarray(kept[processing.numbering]) - first
        return kept

    def _placed(self, tokens: Sequence[int], images: Sequence[_Alone]) -> ImagePrompt:
        """A prompt in which each image has as many tokens as embeddings, from its first one on."""
        # An id that is none would be looked up among the embeddings of text.
        image_id = max(self._image_id, 0)
        prompt: list[int] = []
        prepared: list[PromptImage] = []
        waiting = iter(images)
        left = 0
        for token in tokens:
            if token != self._image_id:
                prompt.append(token)
                continue
            is_first = left == 0
            if is_first:
                image = next(waiting)
                left = image.tokens
                prepared.append(PromptImage(_digest(image.arrays), [], image.arrays))
            left -= 1
            count = 1
            if image.embeddings != image.tokens:
                count = image.embeddings if is_first else 0
            prepared[-1].places.extend(range(len(prompt), len(prompt) + count))
            prompt += [image_id] * count
        return ImagePrompt(prompt, tuple(prepared))

    def _processed(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        with _refusals():
            return self._called(text, list(images))

    def _called(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        if not self._processing.prepared:
            return dict(self._processor(text=[text], images=images, **self._processing.settings))
        from mlx_vlm.utils import prepare_inputs

        inputs: dict[str, Any] = prepare_inputs(
            self._processor,
            images=images,
            prompts=text,
            image_token_index=self._image_id,
            **self._processing.settings,
        )
        return inputs


@contextmanager
def _refusals() -> Iterator[None]:
    """Code of mlx-vlm and transformers may raise anything."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RequestError(
            f"messages: the model's processor refuses the images: {reason}", "messages"
        ) from error


def load_processor(folder: str, model_type: str, trust_remote_code: bool) -> Processor:
    """Loads the processor of a model in a folder.

    Raises:
        ModelError: it cannot be loaded, or its image token is unknown.
    """
    processing = processing_of(model_type)
    # NOTE: a worker shares the machine with the engine's device.
    mx.set_default_device(mx.Device(mx.DeviceType.cpu))
    try:
        # NOTE: this first. It makes transformers load mlx-vlm's processors, which need no torch.
        importlib.import_module(f"mlx_vlm.models.{model_type}")
        from mlx_vlm.utils import load_image_processor
        from transformers import AutoProcessor

        # NOTE: without this argument, mlx-vlm trusts the folder's code.
        processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        # Some types have another one for pixels, as in mlx-vlm's ``load``.
        if (pixels := load_image_processor(Path(folder))) is not None:
            processor.image_processor = pixels
    except Exception as error:  # transformers raises any of its parsers' exceptions
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{folder}: the image processor cannot be loaded: {reason}; "
            "with --text-only, the model is served without images"
        ) from error
    image_id = _image_id(folder, model_type, processor)
    if image_id is None and processing.token is not None:
        raise ModelError(f"{folder}: the tokenizer lacks {processing.token!r}")
    if image_id is None:
        raise ModelError(f"{folder}/config.json: lacks 'image_token_id'")
    if not processing.mark and not getattr(processor, "image_token", None):
        raise ModelError(f"{folder}: the image processor has no token for images")
    if "add_special_tokens" not in processing.settings:
        _add_no_tokens(processor)
    counter = None
    if family_of(model_type).tokens != "each":
        counter = embedding_counter(parsed_config(folder, model_type), model_type)
    return Processor(processor, image_id, processing, counter)


def _add_no_tokens(processor: Any) -> None:
    """Keeps a tokenizer from adding special tokens: a rendered chat template has all of them."""
    backend = getattr(getattr(processor, "tokenizer", processor), "backend_tokenizer", None)
    if backend is not None:
        backend.post_processor = Sequential([])


def _image_id(folder: str, model_type: str, processor: Any) -> int | None:
    """The token of an image; None if nothing says it."""
    processing = processing_of(model_type)
    if processing.token is not None:
        tokenizer = getattr(processor, "tokenizer", processor)
        known: int | None = tokenizer.get_vocab().get(processing.token)
        return known
    if name := processing.config_token:
        return int(getattr(parsed_config(folder, model_type), name))
    # The processors of InternVL know it by the tokenizer.
    if (by_tokenizer := getattr(processor, "img_context_token_id", None)) is not None:
        return int(by_tokenizer)
    config = json.loads((Path(folder) / "config.json").read_bytes())
    ids = (config.get(key) for key in _IMAGE_KEYS)
    return next((each for each in ids if type(each) is int), None)


def mark_of(processor: Processor) -> str:
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
    return Array(str(array.dtype), array.shape, array.tobytes())


def _digest(arrays: dict[str, Array]) -> bytes:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype, array.shape)).encode())
        digest.update(array.data)
    return digest.digest()
