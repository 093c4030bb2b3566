"""A setting with its source, and its form in a TOML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
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


def as_toml(settings: Iterable[Setting]) -> str:
    """The settings as a TOML file, with each one's source as a comment and secrets masked."""
    return "".join(
        f"{_toml_line(setting)}  # {setting.source}\n"
        for setting in settings
        if setting.key not in (CONFIG, PRINT_CONFIG)
    )


def _toml_line(setting: Setting) -> str:
    if setting.key in _SECRETS and setting.value:
        # A comment: a file with the mask as its value would make the mask the key.
        return f"# {setting.key} = {MASK}"
    if setting.value is None:
        return f"# {setting.key} ="
    return f"{setting.key} = {_toml(setting.value)}"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    # A JSON string is a valid TOML string: both escape the same characters in the same way.
    return json.dumps(_PASSWORD.sub(MASK, str(value)), ensure_ascii=False)
