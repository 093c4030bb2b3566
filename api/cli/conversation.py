"""A conversation in the terminal: its messages so far, and the prompt for the next one."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any, Self

from chairlift.api.cli.chat_client import ChatClient, ChatError, Speed

_PROMPT = "> "
# All control characters but newline and tab: a model's text must not control the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Conversation:
    """Sends each question with all messages before it, and prints the reply.

    Args:
        client: the client of the server.
        fields: the other fields of each request; "model" is by default the server's first model.
        system: the system prompt, or None.
    """

    def __init__(self, client: ChatClient, fields: Mapping[str, Any], system: str | None) -> None:
        self._client = client
        self._fields = dict(fields)
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        # One event loop for all replies; with a Runner, Ctrl-C cancels the reply that is running.
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def run(self) -> None:
        """Reads questions from the terminal and answers them, until Ctrl-D.

        Raises:
            ChatError: the server cannot be reached when the conversation begins.
        """
        # readline adds editing and history to input(). Some builds of Python lack it; the
        # terminal's own line editing remains.
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
                self._ask_and_report(line)

    def _ask_and_report(self, question: str) -> None:
        try:
            self.ask(question)
        except ChatError as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)

    def ask(self, question: str) -> None:
        """Prints the reply, and its speed on stderr; adds question and reply to ``messages``.

        Raises:
            ChatError: there is no complete reply. ``messages`` is unchanged.
            KeyboardInterrupt: Ctrl-C. ``messages`` contains the reply so far.
        """
        if not question.strip():
            raise ChatError("there is no question")
        self._choose_model()
        self.messages.append({"role": "user", "content": question})
        reply: list[str] = []
        speed = Speed()
        try:
            self._runner.run(self._print_reply(reply, speed))
        except ChatError:
            reply.clear()
            raise
        finally:
            if speed.first is not None:
                print(flush=True)
            if reply:
                self.messages.append({"role": "assistant", "content": "".join(reply)})
            else:
                self.messages.pop()
        print(speed, file=sys.stderr)

    def _choose_model(self) -> None:
        if "model" not in self._fields:
            self._fields["model"] = self._runner.run(self._client.model())

    async def _print_reply(self, reply: list[str], speed: Speed) -> None:
        on_terminal = sys.stdout.isatty()
        deltas = self._client.reply(self._fields, self.messages, speed)
        async with aclosing(deltas):
            async for text, is_thought in deltas:
                if not is_thought:
                    reply.append(text)
                shown = _CONTROL.sub("", text) if on_terminal else text
                if is_thought:
                    # A pipe gets the reply without the model's reasoning.
                    shown = f"{_DIM}{shown}{_PLAIN}" if on_terminal else ""
                print(shown, end="", flush=True)
