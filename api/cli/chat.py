"""``chairlift chat``: a conversation with a running server, in the terminal or through a pipe."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from chairlift.api.admission.keys import KEY_VARIABLE
from chairlift.api.cli.flags import positive
from chairlift.api.settings import ServerSettings

_SERVER = ServerSettings()
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    parser.description = (
        "Talks to a running server. Ctrl-C stops a reply, Ctrl-D ends the conversation. With a "
        "question, or one that is piped in, it prints the reply and ends."
    )
    add = parser.add_argument
    add("question", nargs="?", help="one question, in place of a conversation")
    add(
        "--base-url",
        type=_url,
        default=f"http://{_SERVER.host}:{_SERVER.port}",
        metavar="URL",
        help="where the server is (default: %(default)s)",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"the server's key (default: ${KEY_VARIABLE}, if it is set)",
    )
    add(
        "--model",
        metavar="NAME",
        help="the model to ask (default: the first that the server lists)",
    )
    add("--system", metavar="TEXT", help="a system prompt (default: none)")
    add(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="0 takes the likeliest token each time (default: the server's)",
    )
    add(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="most tokens of a reply (default: as many as the context has room for)",
    )


def run(options: argparse.Namespace) -> int:
    """Talks; returns 0, 1 if there is no reply to be had, 130 if a single one was interrupted."""
    from chairlift.api.cli.chat_client import ChatClient, ChatError
    from chairlift.api.cli.conversation import Conversation

    key = options.api_key or os.environ.get(KEY_VARIABLE)
    fields: dict[str, Any] = {
        "model": options.model,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        with Conversation(ChatClient(options.base_url, key), given, options.system) as conversation:
            if options.question is None and sys.stdin.isatty():
                conversation.hold()
            else:
                question = options.question
                conversation.ask(_piped() if question is None else question)
    except ChatError as error:
        print(f"chairlift chat: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Who read the reply has left; what Python would still flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return 0


def _piped() -> str:
    return sys.stdin.buffer.read().decode(errors="replace")


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    return text


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value
