"""The page around a scripted engine, on a socket of a thread's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from support.api.api_server import Running, running
from support.api.fake_engine import FakeEngine, Scripted, model_info
from support.api.thinking_caller import TOKENIZER

from chairlift.api.chat import calls
from chairlift.api.schemas.images import ImageReference
from chairlift.api.text.images.data_urls import data_url
from chairlift.api.text.template import Rendering
from chairlift.api.text.vocabulary import Vocabulary
from chairlift.engine.messages import FinishReason, ImagePrompt, Submit

CONTEXT = 1 << 20


@dataclass
class Describer:
    """In place of Vision: a prompt has the type of each image in its place."""

    vocabulary: Vocabulary
    images: list[bytes] = field(default_factory=list)

    async def prepare(
        self, rendering: Rendering, references: Sequence[ImageReference]
    ) -> ImagePrompt:
        found = [data_url(each.url) for each in references]
        self.images = [each.data for each in found]
        types = iter(found)

        def flat(content: str | list[dict[str, Any]]) -> str:
            if isinstance(content, str):
                return content
            return "".join(part.get("text") or f"[{next(types).media_type}]" for part in content)

        messages = [{**each, "content": flat(each["content"])} for each in rendering.messages]
        return ImagePrompt(await self.vocabulary.render(rendering._replace(messages=messages)))


@dataclass
class PageServer:
    """A server, and what its model writes. It does not see images unless a test lets it.

    Attributes:
        url: its address.
        engine: the scripted engine.
        reply, finish, chunk: the text of the next replies, how they end, and the tokens (bytes of
            the text) in each step.
    """

    url: str = ""
    engine: FakeEngine = field(init=False)
    running: Running = field(init=False)
    reply: str = "Hello."
    finish: FinishReason = "stop"
    chunk: int = 4

    def __post_init__(self) -> None:
        info = model_info(vocab_size=len(TOKENIZER), max_context=CONTEXT)
        self.engine = FakeEngine(info, self._script)

    def _script(self, request: Submit, index: int) -> Scripted:
        tokens = list(TOKENIZER.encode(self.reply, add_special_tokens=False))
        if self.finish == "length":
            return Scripted(tokens, "length", chunk=self.chunk)
        return Scripted([*tokens, TOKENIZER.eos_token_id], ended_by_token=True, chunk=self.chunk)

    def set(
        self, reply: str, finish: FinishReason = "stop", chunk: int = 4, step_seconds: float = 0
    ) -> None:
        """Changes what the model writes."""
        self.reply, self.finish, self.chunk = reply, finish, chunk
        self.engine.step_seconds = step_seconds

    @contextmanager
    def seeing(self) -> Iterator[Describer]:
        """Lets the model see images until the context is left; yields what it sees."""
        (entry,) = self.running.service.models.entries
        assert entry.model is not None
        blind, eyes = entry.model, Describer(entry.model.vocabulary)
        entry.model = entry.last = replace(blind, vision=eyes)  # type: ignore[arg-type]
        try:
            yield eyes
        finally:
            entry.model = entry.last = blind

    @property
    def prompt(self) -> str:
        """The text of the prompt that the engine was given last."""
        return str(TOKENIZER.decode(self.engine.submitted[-1].prompt))


@contextmanager
def page_server() -> Iterator[PageServer]:
    """Serves the page until the context is left."""
    server = PageServer()
    started, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with running(server.engine, TOKENIZER) as server.running:
            server.url = server.running.url
            started.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    # Time limits on parsing calls work in the main thread only.
    with patch.object(calls, "within", lambda seconds, work: work()):
        thread.start()
        try:
            assert started.wait(60), "the server did not start"
            yield server
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()
