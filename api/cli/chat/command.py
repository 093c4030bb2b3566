"""``chairlift chat``: chats with a running server, in the terminal or through a pipe."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from typing import Any

from chairlift.api.admission.keys import KEY_VARIABLE, OPENAI_VARIABLE, first_key
from chairlift.api.cli.flags import http_url, positive
from chairlift.api.settings import ServerSettings

_SERVER = ServerSettings()
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``chat``."""
    parser.description = (
        "Chats with a server; without one it offers to start it. Ctrl-C stops a reply, Ctrl-D ends "
        "the conversation, /help lists commands and keys. Given a question, as an argument or "
        "through a pipe, it prints the reply and exits."
    )
    add = parser.add_argument
    add("question", nargs="?", help="ask one question instead of starting a conversation")
    add(
        "--base-url",
        type=http_url,
        default=f"http://{_SERVER.host}:{_SERVER.port}",
        metavar="URL",
        help="the server's address (default: %(default)s)",
    )
    add(
        "--api-key",
        metavar="KEY",
        help=f"the API key (default: ${KEY_VARIABLE}, else ${OPENAI_VARIABLE}, if set)",
    )
    add(
        "--model",
        metavar="NAME",
        help="the model to use (default: the first that the server lists)",
    )
    add(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="show the model an image, a file or URL, with the first question; may be repeated",
    )
    add("--system", metavar="TEXT", help="a system prompt (default: none)")
    add(
        "--temperature",
        type=_temperature,
        metavar="T",
        help="sampling temperature; 0 always takes the most likely token (default: the server's)",
    )
    add(
        "--max-tokens",
        type=positive,
        metavar="N",
        help="maximum tokens of a reply (default: the remaining context)",
    )
    add("--plain", action="store_true", help="print replies as they are, not as markdown")


def run(options: argparse.Namespace) -> int:
    """Runs the chat.

    Returns the exit code: 0, or 1 if the server gave no reply, or 130 after Ctrl-C during a single
    question.
    """
    from chairlift.api.cli.chat.clean import one_line
    from chairlift.api.cli.chat.client import ChatClient, ChatError
    from chairlift.api.cli.chat.conversation import Conversation
    from chairlift.api.cli.chat.display import new_display

    converses = options.question is None and sys.stdin.isatty()
    if converses:
        from chairlift.api.cli.chat.session import Session

    signal.signal(signal.SIGINT, signal.default_int_handler)
    key = options.api_key or first_key(os.environ)
    fields: dict[str, Any] = {
        "model": options.model,
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    client = ChatClient(options.base_url, key)
    display = partial(new_display, options.plain)
    try:
        with Conversation(client, fields, options.system, display) as conversation:
            if converses:
                Session(conversation).run(options.base_url, key, options.image)
            else:
                for image in options.image:
                    conversation.attach(image)
                question = options.question
                conversation.ask(_read_stdin() if question is None else question)
    except ChatError as error:
        print(f"chairlift chat: error: {one_line(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe has ended. Python flushes stdout at exit, so point it to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return 0


def _read_stdin() -> str:
    return sys.stdin.buffer.read().decode(errors="replace")


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value
