"""Turns a text with images into token ids and arrays of pixels. Runs in a worker process."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from chairlift.engine.errors import RequestError
from chairlift.engine.messages import Array, ImagePrompt, ImageSource, PromptImage
from chairlift.engine.model.vision.decoding import decode
from chairlift.engine.model.vision.families import family_of
from chairlift.engine.model.vision.image_arrays import digest_of
from chairlift.engine.model.vision.processors.arrays import arrays_of
from chairlift.engine.model.vision.processors.contexts import silenced
from chairlift.engine.model.vision.processors.counting import EmbeddingCounter
from chairlift.engine.model.vision.processors.marks import Mark
from chairlift.engine.model.vision.processors.processing import Processing, processing_of


@dataclass(frozen=True, slots=True)
class _Alone:
    """An image as the processor makes it alone.

    Attributes:
        tokens: how many tokens of the processor's are its own.
        embeddings: how many the engine needs: one for each of its embeddings.
    """

    arrays: dict[str, Array]
    tokens: int
    embeddings: int


class Processor:
    """The processor of one model.

    Args:
        processor: mlx-vlm's, or the tokenizer of a type that has none.
        image_id: the token of which an image has one or more; None: it has negative ids.
        counter: counts embeddings; None: an image has as many as tokens.

    Attributes:
        mark: what stands for an image in a text.
    """

    def __init__(
        self,
        processor: Any,
        model_type: str,
        image_id: int | None,
        counter: EmbeddingCounter | None,
    ) -> None:
        self._processor = processor
        self._image_id = image_id
        self._tokenizer = tokenizer_of(processor)
        # The token that stands for an embedding in a text.
        has_token = image_id is not None and image_id >= 0
        self._token = self._tokenizer.convert_ids_to_tokens(image_id) if has_token else None
        self._processing = processing_of(model_type)
        self._family = family_of(model_type)
        self._counter = counter
        self.mark = _mark(processor, self._processing)

    def prepare(self, text: str, images: Sequence[Image.Image]) -> ImagePrompt:
        """The tokens of a text, in which each mark became the tokens of one image.

        Raises:
            RequestError: the text has another number of marks, or the processor refuses it.
        """
        self._check(text, len(images))
        whole = self._processed(text, images)
        with self._among(len(images)):
            alone = [self._alone(image, whole if len(images) == 1 else None) for image in images]
        tokens = self._ids(whole)
        theirs, ours = len(self._places(tokens)), sum(each.tokens for each in alone)
        if theirs != ours or not all(each.embeddings for each in alone):
            raise RequestError(
                f"messages: the model's processor makes {theirs} image tokens of these "
                f"images together and {ours} of each alone",
                "messages",
            )
        return self._placed(tokens, alone)

    def _alone(self, image: Image.Image, whole: dict[str, Any] | None) -> _Alone:
        """An image alone; ``whole`` is the result for a prompt that has no other."""
        inputs = self._processed(self.mark.numbered(1), [image]) if whole is None else whole
        places = self._places(self._ids(inputs))
        arrays = arrays_of(inputs, self._processing, self._family, places[0] if places else 0)
        return _Alone(arrays, len(places), self._count(arrays, len(places)))

    def _placed(self, tokens: Sequence[int], images: Sequence[_Alone]) -> ImagePrompt:
        """A prompt in which each image has as many tokens as embeddings."""
        # No embedding is looked up for these, but each token has an id.
        stand_in = getattr(self._tokenizer, "pad_token_id", None) or 0
        own = set(self._places(tokens))
        waiting = iter(images)
        prompt: list[int] = []
        prepared: list[PromptImage] = []
        left = 0
        for place, token in enumerate(tokens):
            count = 1
            if place in own:
                is_first = left == 0
                if is_first:
                    image = next(waiting)
                    left = image.tokens
                    prepared.append(PromptImage(digest_of(image.arrays), [], image.arrays))
                left -= 1
                if image.embeddings != image.tokens:
                    count = image.embeddings if is_first else 0
                prepared[-1].places.extend(range(len(prompt), len(prompt) + count))
            prompt += [token if token >= 0 else stand_in] * count
        return ImagePrompt(prompt, tuple(prepared))

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
        if not self.mark.text and (found := self.mark.first(text)):
            raise RequestError(f"messages: a text must not contain {found!r}", "messages")
        if self._token is not None and self._token in self.mark.removed(text):
            raise RequestError(f"messages: a text must not contain {self._token!r}", "messages")

    def _processed(self, text: str, images: Sequence[Image.Image]) -> dict[str, Any]:
        with _refusals(), silenced():
            if not self._processing.prepared:
                settings = self._processing.settings
                return dict(self._processor(text=text, images=list(images), **settings))
            from mlx_vlm.utils import prepare_inputs

            inputs: dict[str, Any] = prepare_inputs(
                self._processor,
                images=list(images),
                prompts=text,
                image_token_index=self._image_id,
                **self._processing.settings,
            )
            return inputs

    @contextmanager
    def _among(self, images: int) -> Iterator[None]:
        """A context in which a single image is processed as if it were one of ``images``."""
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
        lead = self._family.lead
        return [
            place
            for place, token in enumerate(tokens)
            if place >= lead and (token < 0 or token == self._image_id)
        ]

    def _count(self, arrays: dict[str, Array], tokens: int) -> int:
        """The number of an image's embeddings."""
        if self._counter is None:
            return tokens
        with _refusals():
            return self._counter.count(arrays, tokens)


@contextmanager
def _refusals() -> Iterator[None]:
    """A context for code of mlx-vlm and transformers, which may raise anything."""
    try:
        yield
    except MemoryError:  # a worker says how much memory a job may have
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RequestError(
            f"messages: the model's processor refuses the images: {reason}", "messages"
        ) from error


def _mark(processor: Any, processing: Processing) -> Mark:
    text = processor.image_token if processing.mark is None else processing.mark
    pattern = re.escape(text) if processing.pattern is None else processing.pattern
    return Mark(text, pattern, processing.written or text)


def tokenizer_of(processor: Any) -> Any:
    """Its tokenizer; that of a type without processor is itself."""
    return getattr(processor, "tokenizer", processor)


def mark_of(processor: Processor) -> Mark:
    """The mark that stands for an image in a text."""
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
