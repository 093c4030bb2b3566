"""Prepares the prompts of a vision model: conversations with images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from chairlift.api.schemas.images import ImageReference
from chairlift.api.text.images.loading import ImageLoader
from chairlift.api.text.template import Rendering
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import ImagePrompt
from chairlift.engine.model.vision.processors.loading import load_processor
from chairlift.engine.model.vision.processors.marks import Mark
from chairlift.engine.model.vision.processors.processor import mark_of, prepare
from chairlift.engine.workers.job import Fixture, Job, TooExpensive
from chairlift.engine.workers.pool import Workers

# The time for the images of one request. The processor takes a second for a photograph.
SECONDS = 20.0
# The types of a content part that is an image, in templates.
_PART_TYPES = ("image", "image_url")


class Vision:
    """Turns conversations with images into prompts.

    Args:
        vocabulary: renders them.
        workers: processes for images.
        loader: loads the images' files.
        folder: the model's.
        model_type: see ``ModelInfo.vision_type``.
        trust_remote_code: its processor may be code in its folder.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        workers: Workers,
        loader: ImageLoader,
        folder: Path,
        model_type: str,
        trust_remote_code: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._workers = workers
        self._loader = loader
        arguments = (str(folder), model_type, trust_remote_code)
        self._processor = Fixture(lambda: (load_processor, arguments))
        self._mark: Mark | None = None
        # The type of a content part that is an image, for the template; "" if it takes texts only.
        self._part_type: str | None = None

    async def prepare(
        self, rendering: Rendering, references: Sequence[ImageReference]
    ) -> ImagePrompt:
        """The prompt of a conversation with these images.

        Raises:
            RequestError: an image cannot be loaded, is invalid, or takes too long; or the template,
                or the processor, refuses the conversation.
            QueueFull: too many images are waiting.
        """
        text = await self._vocabulary.render_text(await self._placed(rendering))
        images = await self._loader.load(references)
        return await self._run(prepare, text, images)  # type: ignore[no-any-return]

    async def _placed(self, rendering: Rendering) -> Rendering:
        """The rendering with its images in the form that the template takes."""
        if self._mark is None:
            self._mark = await self._run(mark_of)
        if self._part_type is None:
            self._part_type = await self._taken_type(self._mark)
        numbers = count(1)
        messages = [
            _with_parts(each, self._part_type)
            if self._part_type
            else _with_marks(each, self._mark, numbers)
            for each in rendering.messages
        ]
        return rendering._replace(messages=messages)

    async def _taken_type(self, mark: Mark) -> str:
        """The type of a content part for which the template writes a mark; "" for none."""
        for part_type in _PART_TYPES:
            content = [{"type": part_type}, {"type": "text", "text": "x"}]
            trial = Rendering([{"role": "user", "content": content}], [], True, False, {})
            try:
                text = await self._vocabulary.render_text(trial)
            except RequestError:
                continue
            if mark.count(text) == 1 and "'type'" not in text:
                return part_type
        return ""

    async def _run(self, function: Any, *arguments: Any) -> Any:
        try:
            return await self._workers.run(Job(function, arguments, SECONDS, self._processor))
        except TooExpensive as error:
            raise RequestError(f"messages: preparing the images {error}", "messages") from error


def _with_parts(message: Mapping[str, Any], part_type: str) -> dict[str, Any]:
    """A message whose images are content parts of this type."""
    content = message["content"]
    if not isinstance(content, str):
        content = [p if p["type"] == "text" else {"type": part_type} for p in content]
    return {**message, "content": content}


def _with_marks(message: Mapping[str, Any], mark: Mark, numbers: Iterator[int]) -> dict[str, Any]:
    """A message whose content is a text, with a mark in the place of each image."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(
            p["text"] if p["type"] == "text" else mark.in_message(next(numbers)) for p in content
        )
    return {**message, "content": content}
