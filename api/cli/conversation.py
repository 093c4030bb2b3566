"""A conversation in the terminal: what was said, and the prompt that asks for more."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any, Self

from chairlift.api.cli.chat_client import ChatClient, ChatError, Speed

_PROMPT = "> "
# What a model writes must not steer the terminal: all control characters but newline and tab.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Conversation:
    """Sends what the user says, with all that was said before, and prints the replies.

    Args:
        client: the server.
        fields: of each request; without "model" the server's first one is asked for.
        system: the system prompt, or None.
    """

    def __init__(self, client: ChatClient, fields: Mapping[str, Any], system: str | None) -> None:
        self._client = client
        self._fields = dict(fields)
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        # Its loop outlives replies, and makes of Ctrl-C the cancelling of the one that runs.
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def hold(self) -> None:
        """Asks for one line after the other until Ctrl-D.

        Raises:
            ChatError: the server cannot be reached in the beginning.
        """
        # Gives input() its editing, and a history in memory. A Python built without it has the
        # terminal's own.
        with suppress(ImportError):
            import readline  # noqa: F401

        self._choose_model()
        print(f"{self._fields['model']}: Ctrl-C stops a reply, Ctrl-D ends", file=sys.stderr)
        while True:
            try:
                line = input(_PROMPT)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                continue
            if line.strip():
                self._go_on(line)

    def _go_on(self, line: str) -> None:
        try:
            self.ask(line)
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)

    def ask(self, question: str) -> None:
        """Prints the reply, and on stderr how fast it came; question and reply were said then.

        Raises:
            ChatError: there is none, or it breaks off; neither was said.
            KeyboardInterrupt: Ctrl-C; what came until then was said.
        """
        if not question.strip():
            raise ChatError("there is no question")
        self._choose_model()
        self.messages.append({"role": "user", "content": question})
        said: list[str] = []
        speed = Speed()
        try:
            self._runner.run(self._print_reply(said, speed))
        except ChatError:
            said.clear()
            raise
        finally:
            if speed.first is not None:
                print(flush=True)
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                self.messages.pop()
        print(speed, file=sys.stderr)

    def _choose_model(self) -> None:
        if "model" not in self._fields:
            self._fields["model"] = self._runner.run(self._client.model())

    async def _print_reply(self, said: list[str], speed: Speed) -> None:
        on_terminal = sys.stdout.isatty()
        pieces = self._client.reply(self._fields, self.messages, speed)
        async with aclosing(pieces):
            async for text, thought in pieces:
                if not thought:
                    said.append(text)
                shown = _CONTROL.sub("", text) if on_terminal else text
                if thought:
                    # Through a pipe goes the reply alone.
                    shown = f"{_DIM}{shown}{_PLAIN}" if on_terminal else ""
                print(shown, end="", flush=True)
