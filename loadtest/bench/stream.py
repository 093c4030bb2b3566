"""Builds a reply from the events of its stream and their arrival times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from chairlift.loadtest.bench.metrics import Reply

_ERROR_LENGTH = 300

# Called with the arrival of each chunk that carries a token, in ``time.perf_counter()`` seconds.
ChunkListener = Callable[[float], None]


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    """The fields of a chunk that the load test reads; msgspec skips all others."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class ReplyBuilder:
    """Builds a reply from the events of its stream.

    Attributes:
        reply: the reply.
        events: the number of events so far.
        finished: whether the reply is complete; its usage may still follow.
        done: whether the stream's last event has arrived.
    """

    def __init__(self, reply: Reply, on_chunk: ChunkListener) -> None:
        self.reply = reply
        self.on_chunk = on_chunk
        self.texts: list[str] = []
        self.events = 0
        self.finished = False
        self.done = False

    def add(self, data: bytes, now: float) -> None:
        """Takes one event that arrived at ``now``; puts a failure into ``reply.error``."""
        self.events += 1
        if data == b"[DONE]":
            self.finished = self.done = True
            return
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = shorten(data.decode(errors="replace"))
            self.reply.error = f"malformed event: {error}: {shown}"
            return
        if event.error is not None:
            self.reply.error = f"error event: {error_text(event.error)}"
            return
        if event.usage is not None:
            self._add_usage(event.usage)
        if event.choices:
            self._add_choice(event.choices[0], now)

    def _add_usage(self, usage: _Usage) -> None:
        if usage.completion_tokens is not None:
            self.reply.usage_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self.reply.prompt_tokens = usage.prompt_tokens

    def _add_choice(self, choice: _Choice, now: float) -> None:
        delta = choice.delta
        text = choice.text or ""
        if delta is not None:
            text = (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")
        # Some servers send an empty reason with every chunk.
        ends = bool(choice.finish_reason)
        self.finished |= ends
        # NOTE: do not count the role's chunk, which precedes all tokens, nor a final chunk with
        # only a finish reason: they would make TTFT and ITL look better. Do count a chunk whose
        # token has no text (half a character, a special token), and the final chunk of a reply
        # whose tokens had no text at all.
        only_role = delta is not None and delta.role is not None
        only_end = ends and bool(self.reply.chunk_times)
        if text or not (only_role or only_end):
            self.reply.chunk_times.append(now)
            self.on_chunk(now)
        self.reply.end = now
        if text:
            self.texts.append(text)

    def build(self) -> Reply:
        """Completes the reply, with an error if its stream broke off."""
        self.reply.text = "".join(self.texts)
        if self.reply.ok and not self.finished:
            self.reply.error = "the stream ended before the reply did"
        elif self.reply.ok and not self.reply.chunk_times:
            self.reply.error = "the reply held no token"
        return self.reply


def error_text(error: Any) -> str:
    """The message of an OpenAI-compatible error, shortened to one line."""
    if isinstance(error, dict):
        error = error.get("message", error)
    return shorten(str(error))


def shorten(text: str) -> str:
    """The text in one printable line, cut to ``_ERROR_LENGTH`` characters."""
    # A long text is cut before its words are split, too. A control character could change the
    # terminal's colours.
    line = " ".join(text[: 10 * _ERROR_LENGTH].split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= _ERROR_LENGTH else line[:_ERROR_LENGTH] + "…"
