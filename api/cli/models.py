"""``chairlift models``: lists the models on disk, or lists, loads and unloads those of a server."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from chairlift.api.admission.keys import KEY_VARIABLE, OPENAI_VARIABLE, first_key
from chairlift.api.cli.flags import http_url
from chairlift.api.settings import ServerSettings

if TYPE_CHECKING:
    from chairlift.engine.hub.inventory import StoredModel

_HEADS = ("NAME", "ARCHITECTURE", "SIZE", "WHERE")
_SERVED_HEADS = ("NAME", "STATE", "CONTEXT", "ALIASES")
_SERVER = ServerSettings()
_ACTIONS: tuple[Literal["load", "unload"], ...] = ("load", "unload")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``models``."""
    parser.usage = "%(prog)s [DIR ...] | --loaded | load NAME | unload NAME  [flags]"
    parser.description = (
        "Lists the models in the cache folders of Chairlift and of the Hugging Face hub, with the "
        "names to give to 'chairlift serve'. With --loaded, 'load NAME' or 'unload NAME' it asks a "
        "running server instead, which lists its models, or loads or unloads one."
    )
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="DIR",
        help="also look for .gguf files and model directories below these",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON; sizes in bytes")
    add("--loaded", action="store_true", help="list the models of a running server, with states")
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
        help=f"the server's API key (default: ${KEY_VARIABLE}, else ${OPENAI_VARIABLE}, if set)",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the list, which may be empty, or the model that was loaded; returns the exit code."""
    words: list[str] = options.folders
    if options.loaded or (words and words[0] in _ACTIONS):
        if options.loaded == bool(words) or (words and len(words) != 2):
            options.parser.error("give --loaded, or load or unload with the name of one model")
        return _ask_server(options, words)
    return _list_stored(options, [_folder(options.parser, word) for word in words])


def _list_stored(options: argparse.Namespace, folders: Sequence[Path]) -> int:
    from chairlift.engine.hub.inventory import stored_models

    models = stored_models(folders)
    if options.json:
        print(json.dumps([asdict(model) for model in models], default=str, indent=2))
    elif models:
        print(_table([_HEADS, *map(_stored_row, models)]))
    else:
        print("no model on disk: 'chairlift fetch' downloads one, and so does 'chairlift serve'")
    return 0


def _ask_server(options: argparse.Namespace, words: Sequence[str]) -> int:
    # Imported here, because aiohttp takes a quarter of a second.
    import asyncio

    from chairlift.api.cli.chat.client import ChatClient, ChatError

    client = ChatClient(options.base_url, options.api_key or first_key(os.environ))
    try:
        if options.loaded:
            models = asyncio.run(client.models())
        else:
            [action] = [each for each in _ACTIONS if each == words[0]]
            models = [asyncio.run(client.change_model(words[1], action))]
    except ChatError as error:
        print(f"chairlift: error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(models, indent=2))
    else:
        print(_table([_SERVED_HEADS, *map(_served_row, models)]))
    return 0


def _stored_row(model: StoredModel) -> tuple[str, ...]:
    return model.name, model.architecture, _size(model.size), str(model.path)


def _served_row(model: dict[str, Any]) -> tuple[str, ...]:
    state = model.get("state", "loaded")
    if reason := model.get("reason"):
        state = f"{state}: {reason}"
    context = model.get("max_model_len") or "-"
    return str(model["id"]), str(state), str(context), ", ".join(model.get("aliases", ()))


def _table(rows: Sequence[Sequence[str]]) -> str:
    from chairlift.api.cli.chat.clean import printable

    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _folder(parser: argparse.ArgumentParser, text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir():
        parser.error(f"argument DIR: {text!r} is not a directory")
    return path
