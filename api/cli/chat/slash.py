"""The slash commands of a conversation: one table for their names, help, completion and actions."""

from __future__ import annotations

import base64
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TextIO

from chairlift.api.cli.chat import parameters, saved
from chairlift.api.cli.chat.clean import one_line, printable
from chairlift.api.cli.chat.client import ChatError
from chairlift.api.cli.chat.conversation import Conversation

# The arguments that are paths.
FILE, ANY_FILE = "FILE", "[FILE]"
# The word that removes the system prompt, and images.
_NONE = "none"
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?\s*", re.DOTALL)


class Leave(Exception):
    """The user ends the conversation."""


class Slash(NamedTuple):
    """A slash command.

    Attributes:
        argument: its argument as help shows it; in brackets if it may be absent, empty if it has
            none.
        help: one line.
        run: called with the conversation and the argument, "" if absent. It may raise ChatError,
            Leave or KeyboardInterrupt.
        values: lists the argument's possible values, for completion.
    """

    argument: str
    help: str
    run: Callable[[Conversation, str], None]
    values: Callable[[Conversation], Iterable[str]] = lambda _: ()


def run_command(conversation: Conversation, line: str) -> bool:
    """Runs ``line`` if it is a slash command; returns whether it is.

    A line is one if its first word is a slash and letters, so "/etc/hosts is ..." is a question.

    Raises:
        ChatError: the command is unknown, or its argument is missing or wrong.
        Leave: the command ends the conversation.
    """
    match = _COMMAND.fullmatch(line)
    if match is None:
        return False
    name, argument = match[1], (match[2] or "").strip()
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise ChatError(
            f"/{name} is no command; {hint}/help lists them; a space before the slash sends it"
        )
    if argument and not command.argument:
        raise ChatError(f"/{name} takes no argument")
    if not argument and command.argument and not command.argument.startswith("["):
        raise ChatError(f"/{name} needs {command.argument}")
    command.run(conversation, argument)
    return True


def _help(_: Conversation, __: str) -> None:
    for name, command in COMMANDS.items():
        print(f"  {f'/{name} {command.argument}':<22} {command.help}")
    print(
        "  Enter sends; Alt-Enter (or Esc, Enter) begins a line; Tab completes; arrows recall.\n"
        "  Ctrl-C stops a reply; twice at the prompt, or Ctrl-D, leaves."
    )


def _clear(conversation: Conversation, _: str) -> None:
    conversation.clear()
    print("forgot the conversation; system prompt and parameters stay")


def _system(conversation: Conversation, argument: str) -> None:
    if argument:
        conversation.system = None if argument == _NONE else argument
    print(f"system prompt: {printable(conversation.system or _NONE)}")


def _image(conversation: Conversation, argument: str) -> None:
    if argument == _NONE:
        conversation.images.clear()
    elif argument:
        conversation.attach(argument)
    names = ", ".join(one_line(image.name) for image in conversation.images)
    print(f"images of the next question: {names or _NONE}")


def _set(conversation: Conversation, argument: str) -> None:
    name, _, text = argument.partition(" ")
    fields = {n: value for n, value in conversation.fields.items() if n != "model"}
    if not name:
        for chosen, value in fields.items():
            print(f"  {chosen} {_json(value)}")
        print(f"parameters: {', '.join(parameters.names())}")
        return
    if text.strip():
        fields[name] = parameters.value_of(text.strip())
        parameters.check(fields)
        conversation.fields[name] = fields[name]
        print(f"{name} {_json(fields[name])}")
    else:
        parameters.check({name: None})
        conversation.fields.pop(name, None)
        print(f"{name}: the server's default")


def _model(conversation: Conversation, argument: str) -> None:
    ids = conversation.model_ids()
    if argument:
        if argument not in ids:
            raise ChatError(f"the server has no model {argument!r}, but {', '.join(ids)}")
        conversation.fields["model"] = argument
    for name in ids:
        mark = "*" if name == conversation.fields.get("model") else " "
        print(f"{mark} {one_line(name)}")


def _save(conversation: Conversation, argument: str) -> None:
    path = Path(argument).expanduser()
    fields = dict(conversation.fields)
    model = fields.pop("model", None)
    saved.save(path, saved.Saved(model, conversation.system, conversation.turns, fields))
    print(f"saved {len(conversation.turns)} messages: {one_line(str(path))}")


def _load(conversation: Conversation, argument: str) -> None:
    path = Path(argument).expanduser()
    loaded = saved.load(path)
    model = {n: value for n, value in conversation.fields.items() if n == "model"}
    conversation.clear()
    conversation.fields = {**model, **loaded.parameters}
    conversation.system = loaded.system
    conversation.turns = loaded.turns
    print(f"loaded {len(loaded.turns)} messages")


def _retry(conversation: Conversation, _: str) -> None:
    conversation.retry()


def _copy(conversation: Conversation, _: str) -> None:
    reply = conversation.last_reply
    if reply is None:
        raise ChatError("there is no reply yet")
    copy_to_clipboard(reply, sys.stdout if sys.stdout.isatty() else sys.stderr)
    print(f"sent {len(reply)} characters to the terminal's clipboard")


def copy_to_clipboard(text: str, terminal: TextIO) -> None:
    """Asks the terminal to put ``text`` into the clipboard, by the escape sequence OSC 52.

    It needs no program on this machine and works over ssh. Terminals do not confirm it.

    Raises:
        ChatError: ``terminal`` is none.
    """
    if not terminal.isatty():
        raise ChatError("/copy needs a terminal")
    data = base64.b64encode(text.encode(errors="replace")).decode()
    terminal.write(f"\x1b]52;c;{data}\x07")
    terminal.flush()


def _exit(_: Conversation, __: str) -> None:
    raise Leave


def _json(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False))


COMMANDS = {
    "help": Slash("", "list the commands and keys", _help),
    "clear": Slash("", "forget the conversation so far", _clear),
    "system": Slash("[TEXT]", f"show or set the system prompt; {_NONE} removes it", _system),
    "image": Slash(
        ANY_FILE,
        f"show the model an image, a file or URL, with the next question; {_NONE} removes all",
        _image,
    ),
    "set": Slash(
        "[NAME [VALUE]]",
        "set a parameter; without VALUE, back to the server's default; without NAME, list them",
        _set,
        lambda _: parameters.names(),
    ),
    "model": Slash(
        "[ID]", "list the server's models, or choose one", _model, lambda chat: chat.known_models
    ),
    "save": Slash(FILE, "save the conversation as JSON", _save),
    "load": Slash(FILE, "continue a saved conversation", _load),
    "retry": Slash("", "ask the last question again", _retry),
    "copy": Slash("", "copy the last reply to the clipboard (OSC 52)", _copy),
    "exit": Slash("", "leave", _exit),
}
