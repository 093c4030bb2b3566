"""Prepares the prompts of a model that sees: conversations with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift.api.schemas.images import ImageReference
from chairlift.api.text.images.loading import ImageLoader
from chairlift.api.text.template import Rendering
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import ImagePrompt
from chairlift.engine.model.vision.processor import load_processor, mark_of, prepare
from chairlift.engine.workers.job import Fixture, Job, TooExpensive
from chairlift.engine.workers.pool import Workers

# The time for the images of one request. The processor takes a second for a photograph.
SECONDS = 20.0


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
        self._mark: str | None = None
        self._takes_parts: bool | None = None

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
        if self._takes_parts is None:
            self._takes_parts = await self._template_takes_parts(self._mark)
        if self._takes_parts:
            return rendering
        mark = self._mark
        return rendering._replace(messages=[_with_marks(each, mark) for each in rendering.messages])

    async def _template_takes_parts(self, mark: str) -> bool:
        """Whether the template writes a mark for a content part that is an image."""
        content = [{"type": "image"}, {"type": "text", "text": "x"}]
        trial = Rendering([{"role": "user", "content": content}], [], True, False, {})
        try:
            text = await self._vocabulary.render_text(trial)
        except RequestError:
            return False
        return text.count(mark) == 1 and "'type'" not in text

    async def _run(self, function: Any, *arguments: Any) -> Any:
        try:
            return await self._workers.run(Job(function, arguments, SECONDS, self._processor))
        except TooExpensive as error:
            raise RequestError(f"messages: preparing the images {error}", "messages") from error


def _with_marks(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A message whose content is a text, with ``mark`` in the place of each image."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(mark if p["type"] == "image" else p["text"] for p in content)
    return {**message, "content": content}
