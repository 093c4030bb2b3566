"""Reads a parser's values from flags, environment variables, a TOML file and defaults.

An earlier source in this list overrides a later one. Every flag of the parser can be set in each of
these ways.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "CHAIRLIFT_"
# These flags select the sources, so a file cannot contain them.
CONFIG, PRINT_CONFIG = "config", "print-config"
MASK = "********"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")


class ConfigError(Exception):
    """A value in the environment or the file is wrong. The message is one line that names it."""


class Setting(NamedTuple):
    """A value in its form for a TOML file.

    ``source`` is "flag", "default", the name of an environment variable or the path of a file.
    """

    key: str
    value: Any
    source: str


class Resolved(NamedTuple):
    """All values as argparse returns them, and as settings with their sources, in parser order."""

    options: argparse.Namespace
    settings: tuple[Setting, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Configuration"."""
    add = parser.add_argument_group("Configuration").add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file of flags, named without the leading dashes, like port = 8080 and "
        f'model = "…"; a variable like {PREFIX}PORT overrides it, and a flag overrides both '
        "(default: none)",
    )
    add(
        "--print-config",
        action="store_true",
        help="print all values with their sources, in the form of such a file, and exit",
    )


def resolve(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> Resolved:
    """Reads all sources of the values of ``parser``.

    ``parser`` must have accepted ``arguments``, the command-line arguments, already.

    Raises:
        ConfigError: a value in the environment or the file is wrong, or the file is not readable.
    """
    actions = {_key(action): action for action in _actions(parser)}
    found = {key: Setting(key, action.default, "default") for key, action in actions.items()}
    variables = dict(_from_environment(actions, environment))
    flags = _from_flags(parser, actions, arguments)
    config = flags.get(CONFIG) or variables.get(CONFIG)
    if config is not None:
        found |= _from_file(config.value, actions)
    found |= variables | flags
    options = {actions[key].dest: setting.value for key, setting in found.items()}
    settings = (
        setting._replace(value=not setting.value) if _negates(actions[key]) else setting
        for key, setting in found.items()
    )
    return Resolved(argparse.Namespace(**options), tuple(settings))


def as_toml(settings: Iterable[Setting]) -> str:
    """The settings as a TOML file, with each one's source as a comment and passwords masked."""
    return "".join(
        f"{_toml_line(setting)}  # {setting.source}\n"
        for setting in settings
        if setting.key not in (CONFIG, PRINT_CONFIG)
    )


def _toml_line(setting: Setting) -> str:
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


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    # NOTE: argparse has no public list of actions; completion tools read this one, too.
    return [action for action in parser._actions if action.dest != "help"]


def _key(action: argparse.Action) -> str:
    """The long flag without its dashes, or the name of a positional argument."""
    return next((name[2:] for name in action.option_strings if name[:2] == "--"), action.dest)


def _variable(key: str) -> str:
    return PREFIX + key.upper().replace("-", "_")


def _from_flags(
    parser: argparse.ArgumentParser,
    actions: Mapping[str, argparse.Action],
    arguments: Sequence[str],
) -> dict[str, Setting]:
    # In a copy without defaults, every value that is not None was given as a flag.
    bare = copy.deepcopy(parser)
    bare.set_defaults(**dict.fromkeys(action.dest for action in _actions(parser)))
    values = vars(bare.parse_args(arguments))
    return {
        key: Setting(key, values[action.dest], "flag")
        for key, action in actions.items()
        if values[action.dest] is not None
    }


def _from_environment(
    actions: Mapping[str, argparse.Action], environment: Mapping[str, str]
) -> Iterator[tuple[str, Setting]]:
    for key, action in actions.items():
        variable = _variable(key)
        # An empty variable counts as absent, because compose files set absent ones to empty.
        if key == PRINT_CONFIG or not (text := environment.get(variable)):
            continue
        given = text.split(",") if _repeats(action) else text
        yield key, Setting(key, _value(action, given, variable), variable)


def _from_file(path: Path, actions: Mapping[str, argparse.Action]) -> dict[str, Setting]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    known = [key for key in actions if key not in (CONFIG, PRINT_CONFIG)]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path}: unknown key {key[:64]!r}{hint}")
    return {
        key: Setting(key, _value(actions[key], given, f"{path}: {key}"), str(path))
        for key, given in table.items()
    }


def _value(action: argparse.Action, given: object, place: str) -> Any:
    """The value that argparse would return for this flag with ``given`` as its argument."""
    if action.nargs == 0:
        return _switched(action, given, place)
    if _repeats(action):
        if not isinstance(given, list):
            raise ConfigError(f"{place}: must be a list")
        return [_single(action, item, place) for item in given]
    return _single(action, given, place)


def _single(action: argparse.Action, given: object, place: str) -> Any:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        raise ConfigError(f"{place}: must be a text or a number")
    kind: Callable[[str], Any] = action.type if callable(action.type) else str
    try:
        value = kind(str(given))
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from error
    if action.choices is not None and value not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise ConfigError(f"{place}: {value!r} is not one of {choices}")
    return value


def _switched(action: argparse.Action, given: object, place: str) -> bool:
    if isinstance(given, str) and given.lower() in _TRUE + _FALSE:
        given = given.lower() in _TRUE
    if not isinstance(given, bool):
        raise ConfigError(f"{place}: must be true or false")
    return not given if _negates(action) else given


def _negates(action: argparse.Action) -> bool:
    """Whether the flag is a switch that stores False."""
    return action.nargs == 0 and action.const is False


def _repeats(action: argparse.Action) -> bool:
    return isinstance(action.default, list)
