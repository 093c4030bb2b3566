"""Counts the tokens of prompts with a tokenizer on this machine, for ``--tokenizer``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from chairlift.loadtest.errors import UsageError

_FILE = "tokenizer.json"


def local_counter(name: str) -> Callable[[str], Awaitable[int]]:
    """A counter of a text's tokens, with the special tokens that the tokenizer adds.

    ``name`` is a tokenizer.json, a folder with one, or a repository of the Hugging Face hub, whose
    file is downloaded once.

    Raises:
        UsageError: there is no such tokenizer, or it cannot be read.
    """
    # Imported here: `chairlift bench --help` does without it.
    from tokenizers import Tokenizer

    path = _find(name)
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises no narrower class
        raise UsageError(f"--tokenizer {name}: {path} cannot be read: {error}") from error

    async def count(text: str) -> int:
        # On a thread: the event loop shows progress and sees Ctrl-C meanwhile.
        return len((await asyncio.to_thread(tokenizer.encode, text)).ids)

    return count


def _find(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir():
        if (path / _FILE).is_file():
            return path / _FILE
        raise UsageError(f"--tokenizer {name}: the folder has no {_FILE}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError
    from tqdm.auto import tqdm

    # tqdm takes type arguments in its stubs only.
    class TerminalBar(tqdm):  # type: ignore[type-arg]
        """A bar on a terminal, and nothing in a pipe, where the hub's own bar would write."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": None})

    try:
        return Path(hf_hub_download(name, _FILE, tqdm_class=TerminalBar))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"--tokenizer {name}: neither a file, nor a folder, nor a model of the hub: {reason}"
        ) from error
