"""A conversation: its messages so far and the parameters of its requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Self

from chairlift.api.cli.chat.clean import encodable
from chairlift.api.cli.chat.client import ChatClient, ChatError, Speed
from chairlift.api.cli.chat.display import Display
from chairlift.api.cli.chat.images import (
    MAX_BYTES,
    Content,
    Image,
    content_of,
    image_of,
    read_image,
)


class Conversation:
    """Sends each question with all messages before it, and shows the reply.

    Args:
        client: the client of the server.
        fields: the other fields of each request; "model" is by default the server's first model.
        system: the system prompt, or None.
        new_display: makes the display of one reply.

    Attributes:
        fields: the other fields of each request.
        system: the system prompt, or None.
        turns: the user's and the model's messages, in turn.
        images: those of the next question.
        unanswered: the last question if it got no reply, else None.
        known_models: the ids that the server listed when it was asked last.
    """

    def __init__(
        self,
        client: ChatClient,
        fields: Mapping[str, Any],
        system: str | None,
        new_display: Callable[[], Display],
    ) -> None:
        self._client = client
        self._new_display = new_display
        self.fields = dict(fields)
        self.system = system
        self.turns: list[dict[str, Any]] = []
        self.images: list[Image] = []
        self.unanswered: Content | None = None
        self.known_models: list[str] = []
        # One event loop for all replies; with a Runner, Ctrl-C cancels the reply that is running.
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the next request: the system prompt, if any, and the turns."""
        if self.system is None:
            return list(self.turns)
        return [{"role": "system", "content": self.system}, *self.turns]

    @property
    def last_reply(self) -> str | None:
        """The model's last reply, or None."""
        return str(self.turns[-1]["content"]) if self.turns else None

    def ask(self, question: str) -> None:
        """Shows the reply, and its speed on stderr; adds question and reply to ``turns``.

        The question is about ``images``, too, which the next question then has no longer.

        Raises:
            ChatError: there is no complete reply. ``turns`` is unchanged.
            KeyboardInterrupt: Ctrl-C. ``turns`` contains the reply so far, if there is one.
        """
        if not question.strip():
            raise ChatError("there is no question")
        self.choose_model()
        content = content_of(encodable(question), self.images)
        self.images = []
        self._ask(content)

    def attach(self, source: str) -> None:
        """Adds an image, a file or one at a URL, to the next question.

        Raises:
            ChatError: there is none, or the model takes no images.
        """
        self.choose_model()
        model = self.fields["model"]
        if not self._runner.run(self._client.sees(model)):
            raise ChatError(f"the model {model} takes no images")
        if source.startswith(("http://", "https://")):
            data = self._runner.run(self._client.fetch(source, MAX_BYTES))
            self.images.append(image_of(data, source))
        else:
            self.images.append(read_image(source))

    def _ask(self, question: Content) -> None:
        self.unanswered = question
        speed = Speed()
        reply: list[str] = []
        try:
            self._runner.run(self._show_reply(question, reply, speed))
        except KeyboardInterrupt:
            self._add_turn(reply)
            raise
        self._add_turn(reply)
        print(speed, file=sys.stderr)

    def retry(self) -> None:
        """Asks the last question again; the new reply replaces the old one.

        Raises:
            ChatError, KeyboardInterrupt: as ``ask``. Without a new reply the old one stays.
        """
        if self.unanswered is not None:
            self._ask(self.unanswered)
            return
        if not self.turns:
            raise ChatError("there is no question yet")
        old = self.turns[-2:]
        del self.turns[-2:]
        kept = len(self.turns)
        try:
            self._ask(old[0]["content"])
        finally:
            if len(self.turns) == kept:
                self.turns += old
                self.unanswered = None

    def clear(self) -> None:
        """Forgets all turns; system prompt and parameters stay."""
        self.turns.clear()
        self.images.clear()
        self.unanswered = None

    def choose_model(self) -> None:
        """Takes the server's first model if none is chosen.

        Raises:
            ChatError: the server lists none or cannot be reached.
        """
        if "model" not in self.fields:
            self.fields["model"] = self.model_ids()[0]

    def model_ids(self) -> list[str]:
        """The ids of the server's models, at least one.

        Raises:
            ChatError: the server lists none or cannot be reached.
        """
        self.known_models = self._runner.run(self._client.model_ids())
        return self.known_models

    def is_healthy(self) -> bool:
        """Whether the server answers and has loaded its model."""
        return self._runner.run(self._client.is_healthy())

    def _add_turn(self, reply: list[str]) -> None:
        if reply and self.unanswered is not None:
            self.turns.append({"role": "user", "content": self.unanswered})
            self.turns.append({"role": "assistant", "content": "".join(reply)})
            self.unanswered = None

    async def _show_reply(self, question: Content, reply: list[str], speed: Speed) -> None:
        """Shows the reply to ``question`` and adds its texts to ``reply``."""
        messages = [*self.messages, {"role": "user", "content": question}]
        display = self._new_display()
        refreshing = asyncio.create_task(display.refresh())
        try:
            deltas = self._client.reply(self.fields, messages, speed)
            async with aclosing(deltas):
                async for text, is_thought in deltas:
                    if not is_thought:
                        reply.append(encodable(text))
                    display.add(text, is_thought)
        finally:
            refreshing.cancel()
            display.close()
