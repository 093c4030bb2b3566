"""A setting with its source, and its form in a TOML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# These flags select the sources, so a file cannot contain them.
CONFIG, PRINT_CONFIG = "config", "print-config"
MASK = "********"
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# Their values are never printed.
_SECRETS = ("api-key",)


class Setting(NamedTuple):
    """A value in its form for a TOML file.

    ``source`` is "flag", "default", the name of an environment variable or the path of a file.
    """

    key: str
    value: Any
    source: str


class Chosen(NamedTuple):
    """The value, or None, that run time uses for a setting without one, and an explanation."""

    value: object
    source: str


def as_toml(settings: Iterable[Setting], chosen: Mapping[str, Chosen] | None = None) -> str:
    """The settings as a TOML file, with each one's source as a comment and secrets masked.

    ``chosen`` has the values of settings without one. They are comments, too: a file that pins them
    would not fit another machine.
    """
    return "".join(
        f"{_toml_line(setting, (chosen or {}).get(setting.key))}\n"
        for setting in settings
        if setting.key not in (CONFIG, PRINT_CONFIG)
    )


def _toml_line(setting: Setting, chosen: Chosen | None) -> str:
    key, value, source = setting
    if key in _SECRETS and value:
        # A comment: a file with the mask as its value would make the mask the key.
        return f"# {key} = {MASK}  # {source}"
    if value is not None:
        return f"{key} = {_toml(value)}  # {source}"
    if chosen is None:
        return f"# {key} =  # {source}"
    text = "" if chosen.value is None else f" {chosen.value}"
    return f"# {key} ={text}  # {chosen.source}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        pairs = (f"{key} = {_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    # A JSON string is a valid TOML string, but for the one character that JSON does not escape.
    text = json.dumps(_PASSWORD.sub(MASK, str(value)), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
