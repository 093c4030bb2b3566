"""Turns a text with images into token ids and arrays of pixels. Runs in a worker process."""

from __future__ import annotations

import importlib
import io
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image
from tokenizers.processors import Sequence as Sequential

from chairlift.engine.errors import ModelError, RequestError
from chairlift.engine.messages import ImagePrompt, ImageSource, PromptImage
from chairlift.engine.model.vision.decoding import decode
from chairlift.engine.model.vision.image_arrays import arrays_of, digest_of
from chairlift.engine.model.vision.marks import Mark
from chairlift.engine.model.vision.pil_backend import pil_backend
from chairlift.engine.model.vision.processing import Processing, processing_of

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
        image_id: the token of which an image has one for each of its embeddings; None: it has
            negative ids.
        processing: how it is called.

    Attributes:
        mark: what stands for an image in a text.
    """

    def __init__(self, processor: Any, image_id: int | None, processing: Processing) -> None:
        self._processor = processor
        self._image_id = image_id
        tokenizer = processor.tokenizer
        # What stands for an embedding in a text.
        self._token = None if image_id is None else tokenizer.convert_ids_to_tokens(image_id)
        self._processing = processing
        self.mark = _mark(processor, processing)

    def prepare(self, text: str, images: Sequence[Image.Image]) -> ImagePrompt:
        """The tokens of a text, in which each mark became the tokens of one image.

        Raises:
            RequestError: the text has another number of marks, or the processor refuses it.
        """
        self._check(text, len(images))
        whole = self._processed(text, images)
        alone = [whole]
        if len(images) > 1:
            with self._among(len(images)):
                alone = [self._processed(self.mark.numbered(1), [image]) for image in images]
        counts = [self._count(each) for each in alone]
        tokens = self._ids(whole)
        if self._processing.counted:
            tokens = _lengthened(tokens, counts)
        places = self._places(tokens)
        if sum(counts) != len(places) or not all(counts):
            raise RequestError(
                f"messages: the model's processor makes {len(places)} image tokens of these "
                f"images together and {sum(counts)} of each alone",
                "messages",
            )
        prepared, start = [], 0
        for inputs, count in zip(alone, counts, strict=True):
            arrays = arrays_of(inputs, self._processing, self._places(self._ids(inputs))[0])
            own = places[start : start + count]
            prepared.append(PromptImage(digest_of(arrays), own, arrays))
            start += count
        # No embedding is looked up for these, but each token has an id.
        stand_in = getattr(self._processor.tokenizer, "pad_token_id", None) or 0
        return ImagePrompt([t if t >= 0 else stand_in for t in tokens], tuple(prepared))

    def _check(self, text: str, images: int) -> None:
        most = self._processing.most
        if most is not None and images > most:
            raise RequestError(
                f"messages: a prompt of this model has at most {most} image{'s' * (most > 1)}",
                "messages",
            )
        marks = self.mark.count(text)
        if self.mark.text and (marks != images or not self.mark.are_in_order(text)):
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
            with _silenced():
                return dict(self._processor(text=text, images=list(images), **settings))
        except Exception as error:  # it may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RequestError(
                f"messages: the model's processor refuses the images: {reason}", "messages"
            ) from error

    @contextmanager
    def _among(self, images: int) -> Iterator[None]:
        """A context in which an image alone is processed as one of so many."""
        tiled = self._processing.tiled
        if tiled is None or images <= tiled:
            yield
            return
        resolutions = self._processor.candidate_resolutions
        self._processor.candidate_resolutions = resolutions[:1]
        try:
            yield
        finally:
            self._processor.candidate_resolutions = resolutions

    def _ids(self, inputs: dict[str, Any]) -> list[int]:
        ids: list[int] = np.asarray(inputs["input_ids"]).reshape(-1).tolist()
        # A template that writes BOS is right, and one that leaves it to the processor, too.
        twice = self._processing.begins and ids[:1] == ids[1:2]
        return ids[1:] if twice else ids

    def _places(self, tokens: Sequence[int]) -> list[int]:
        lead = self._processing.lead
        return [
            place
            for place, token in enumerate(tokens)
            if place >= lead and (token < 0 or token == self._image_id)
        ]

    def _count(self, inputs: dict[str, Any]) -> int:
        """The number of an image's embeddings."""
        if self._processing.counted is not None:
            return int(np.asarray(inputs[self._processing.counted]).sum())
        return len(self._places(self._ids(inputs)))


def _lengthened(tokens: Sequence[int], counts: Sequence[int]) -> list[int]:
    """As many negative tokens for each image, instead of one."""
    left = iter(counts)
    return [token for each in tokens for token in [each] * (next(left, 0) if each < 0 else 1)]


def _mark(processor: Any, processing: Processing) -> Mark:
    text = processor.image_token if processing.mark is None else processing.mark
    alternatives = [re.escape(each) for each in (text, processing.other_mark) if each]
    pattern = processing.pattern or "|".join(alternatives)
    return Mark(text, pattern, processing.written or text)


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
        package = importlib.import_module(f"mlx_vlm.models.{model_type}")
        from mlx_vlm.utils import load_image_processor
        from transformers import AutoProcessor

        with pil_backend(processing.pil), _silenced():
            # NOTE: without this argument, mlx-vlm trusts the folder's code.
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
            # Some types have another one for pixels, as in mlx-vlm's ``load``.
            pixels = load_image_processor(Path(folder))
        if pixels is not None:
            processor.image_processor = pixels
        tokenizer = processor.tokenizer
    except Exception as error:  # transformers raises any of its parsers' exceptions
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{folder}: the image processor cannot be loaded: {reason}; "
            "with --text-only, the model is served without images"
        ) from error
    if processing.mark is None and not getattr(processor, "image_token", None):
        raise ModelError(f"{folder}: the image processor has no token for images")
    if "add_special_tokens" not in processing.settings:
        _add_no_tokens(tokenizer)
    if processing.completes is not None:
        processing.completes(processor)
    return Processor(processor, _image_id(processor, package, folder, processing), processing)


@contextmanager
def _silenced() -> Iterator[None]:
    """A context without what code of mlx-vlm prints and warns of."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _image_id(processor: Any, package: Any, folder: str, processing: Processing) -> int | None:
    """The token that stands for an embedding of an image; None if all have negative ids."""
    if isinstance(processing.token, int):
        return None if processing.token < 0 else processing.token
    if processing.token is not None:
        tokenizer = processor.tokenizer
        known: int | None = tokenizer.convert_tokens_to_ids(processing.token)
        others = getattr(tokenizer, "unk_token", None)
        is_other = processing.token != others and known == getattr(tokenizer, "unk_token_id", None)
        if known is None or is_other:
            raise ModelError(f"{folder}: the tokenizer has no {processing.token!r}")
        return known
    config = json.loads((Path(folder) / "config.json").read_bytes())
    parts = (config, config.get("thinker_config") or {}, vars(package.ModelConfig))
    found = (part.get(name) for part in parts for name in _ID_NAMES)
    image_id = next((each for each in found if type(each) is int), None)
    # The processors of InternVL know it by the tokenizer.
    image_id = getattr(processor, "img_context_token_id", image_id)
    if image_id is None:
        raise ModelError(f"{folder}/config.json: lacks 'image_token_id'")
    return image_id


def _add_no_tokens(tokenizer: Any) -> None:
    """Keeps a tokenizer from adding special tokens: a rendered chat template has all of them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.post_processor = Sequential([])


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
