"""Conversations in files. A file is the JSON body of a chat request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.api.cli.chat import parameters
from chairlift.api.cli.chat.client import ChatError
from chairlift.api.cli.chat.images import is_content

_TURNS = ("user", "assistant")


class Saved(NamedTuple):
    """A conversation.

    Attributes:
        model: the model that wrote the replies, or None.
        system: the system prompt, or None.
        turns: the user's and the model's messages, in turn.
        parameters: the requests' other fields.
    """

    model: str | None
    system: str | None
    turns: list[dict[str, Any]]
    parameters: dict[str, Any]


def save(path: Path, saved: Saved) -> None:
    """Writes a file that only its owner can read. It replaces only a saved conversation.

    Raises:
        ChatError: the file cannot be written, or is something else.
    """
    if path.exists():
        try:
            load(path)
        except ChatError as error:
            raise ChatError(f"{path} exists and is no saved conversation") from error
    system = [] if saved.system is None else [{"role": "system", "content": saved.system}]
    body = {"model": saved.model, **saved.parameters, "messages": system + saved.turns}
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(file, "w", encoding="utf-8") as text:
            json.dump(body, text, indent=2)
            text.write("\n")
        new.replace(path)
    except (OSError, ValueError) as error:
        new.unlink(missing_ok=True)
        raise ChatError(f"cannot save {path}: {error}") from error


def load(path: Path) -> Saved:
    """Reads a saved conversation.

    Raises:
        ChatError: the file cannot be read or holds no conversation.
    """
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise ChatError(f"cannot load {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ChatError(f"{path} is no saved conversation: it is not JSON") from error
    if not isinstance(body, dict):
        raise ChatError(f"{path} is no saved conversation: it is no JSON object")
    model, messages = body.pop("model", None), body.pop("messages", None)
    if not (isinstance(model, str | None) and _are_messages(messages)):
        raise ChatError(f"{path} is no saved conversation: it has no model or messages")
    has_system = bool(messages) and messages[0]["role"] == "system"
    system = messages.pop(0)["content"] if has_system else None
    roles = [message["role"] for message in messages]
    if roles != [*_TURNS] * (len(roles) // 2):
        raise ChatError(f"{path}: after a system prompt, user and assistant must take turns")
    parameters.check(body)
    return Saved(model, system, messages, body)


def _are_messages(messages: object) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and (isinstance(message["content"], str) or message["role"] == "user")
        and is_content(message["content"])
        for message in messages
    )
