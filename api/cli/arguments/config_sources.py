"""Reads a parser's values from flags, environment variables, a TOML file and defaults.

An earlier source in this list overrides a later one. Every flag of the parser can be set in each of
these ways, by any of its names.
"""

from __future__ import annotations

import argparse
import copy
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.api.cli.arguments.aliases import AliasAction
from chairlift.api.cli.arguments.list_types import LIST_TYPES
from chairlift.api.cli.arguments.parser import suggestion
from chairlift.api.cli.arguments.setting import CONFIG, PRINT_CONFIG, Setting

PREFIX = "CHAIRLIFT_"
# Variables that are no flags, and are read where they are needed.
OTHER_VARIABLES = ("CHAIRLIFT_BLAS", "CHAIRLIFT_CACHE")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Kubernetes sets these in every pod for services whose names begin with "chairlift-".
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")

_Actions = Mapping[str, argparse.Action]


class ConfigError(Exception):
    """A value in the environment or the file is wrong. The message is one line that names it."""


class TablesAction(argparse._StoreAction):
    """A list of texts on the command line, in which a file may also have tables."""


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
        ConfigError: a value in the environment or the file is wrong, a name there is unknown, two
            names of one flag have different values, or the file is not readable.
    """
    actions = {_key(action): action for action in _actions(parser)}
    found = {
        key: Setting(key, action.default, "default")
        for key, action in actions.items()
        if not isinstance(action, AliasAction)
    }
    variables = _from_environment(actions, environment)
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


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    # NOTE: argparse has no public list of actions; completion tools read this one, too.
    return [action for action in parser._actions if action.dest not in ("help", "help_all")]


def _key(action: argparse.Action) -> str:
    """The long flag without its dashes, or the name of a positional argument."""
    if isinstance(action, AliasAction) and action.is_flag_only:
        return action.dest
    return next((name[2:] for name in action.option_strings if name[:2] == "--"), action.dest)


def _in_sources(actions: _Actions) -> dict[str, argparse.Action]:
    """The actions that files and variables may set."""
    return {
        key: action
        for key, action in actions.items()
        if not (isinstance(action, AliasAction) and action.is_flag_only)
    }


def _variable(key: str) -> str:
    return PREFIX + key.upper().replace("-", "_")


def _from_flags(
    parser: argparse.ArgumentParser, actions: _Actions, arguments: Sequence[str]
) -> dict[str, Setting]:
    # In a copy without defaults, every value that is not None was given as a flag.
    bare = copy.deepcopy(parser)
    bare.set_defaults(**dict.fromkeys(action.dest for action in _actions(parser)))
    values = vars(bare.parse_args(arguments))
    given = {
        key: Setting(key, values[action.dest], "flag")
        for key, action in actions.items()
        # Without arguments, the value of a positional list is empty.
        if values[action.dest] is not None and (action.nargs != "*" or values[action.dest])
    }
    names = {key: (*action.option_strings, key.upper())[0] for key, action in actions.items()}
    return _without_aliases(given, actions, names.__getitem__)


def _from_environment(actions: _Actions, environment: Mapping[str, str]) -> dict[str, Setting]:
    known = {_variable(key): key for key in _in_sources(actions) if key != PRINT_CONFIG}
    for name in environment:
        _check_variable(name, environment[name], known)
    # An empty variable counts as absent, because compose files set absent ones to empty.
    found = {
        key: Setting(key, _value(actions[key], _listed(actions[key], text), variable), variable)
        for variable, key in known.items()
        if (text := environment.get(variable))
    }
    return _without_aliases(found, actions, _variable)


def _listed(action: argparse.Action, text: str) -> object:
    return text.split(",") if _repeats(action) else text


def _check_variable(name: str, value: str, known: Mapping[str, str]) -> None:
    if not name.startswith(PREFIX) or name in known or name in OTHER_VARIABLES or not value:
        return
    if _SERVICE_LINK.fullmatch(name) or (name.endswith("_PORT") and _SERVICE_ADDRESS.match(value)):
        return
    near = suggestion(name, (*known, *OTHER_VARIABLES))
    raise ConfigError(f"unknown variable {name[:64]}{near}")


def _from_file(path: Path, actions: _Actions) -> dict[str, Setting]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    known = [key for key in _in_sources(actions) if key not in (CONFIG, PRINT_CONFIG)]
    return _from_table(table, actions, known, str(path))


def table_values(
    parser: argparse.ArgumentParser, table: Mapping[str, object], known: Iterable[str], place: str
) -> dict[str, Any]:
    """The values of a table of flags, by their ``dest``, as argparse would return them.

    Args:
        parser: the parser of the flags.
        table: the table of a file.
        known: the keys that it may have; other names of these flags are accepted, too.
        place: where it stands, for errors.

    Raises:
        ConfigError: a key is unknown, or its value is wrong.
    """
    actions = {_key(action): action for action in _actions(parser)}
    keys = set(known)
    keys |= {key for key, a in actions.items() if isinstance(a, AliasAction) and a.of in keys}
    in_sources = [key for key in _in_sources(actions) if key in keys]
    found = _from_table(table, actions, in_sources, place)
    return {actions[key].dest: setting.value for key, setting in found.items()}


def keys_of(actions: Iterable[argparse.Action]) -> list[str]:
    """The names of flags in files."""
    return [_key(action) for action in actions if action.dest not in ("help", "help_all")]


def _from_table(
    table: Mapping[str, object], actions: _Actions, known: Sequence[str], place: str
) -> dict[str, Setting]:
    for key in table:
        if key not in known:
            raise ConfigError(f"{place}: unknown key {key[:64]!r}{suggestion(key, known)}")
    found = {
        key: Setting(key, _value(actions[key], given, f"{place}: {key}"), place)
        for key, given in table.items()
    }
    return _without_aliases(found, actions, lambda key: f"{place}: {key}")


def _without_aliases(
    found: Mapping[str, Setting], actions: _Actions, name: Callable[[str], str]
) -> dict[str, Setting]:
    """The settings of one source, with those under other names put under their flags' names.

    ``name`` gives a key's name in this source, for errors.
    """
    names = {key: key for key in found if not isinstance(actions[key], AliasAction)}
    settings = {key: found[key] for key in names}
    for key, alias, setting in _aliases(found, actions):
        value = alias.translated(setting.value)
        if (of := alias.of) is None:
            continue
        if of not in settings:
            settings[of], names[of] = Setting(of, value, setting.source), key
        elif not alias.agrees(value, settings[of].value):
            raise ConfigError(f"{name(key)} and {name(names[of])} say different things; give one")
    return settings


def _aliases(
    found: Mapping[str, Setting], actions: _Actions
) -> Iterator[tuple[str, AliasAction, Setting]]:
    for key, setting in found.items():
        action = actions[key]
        if isinstance(action, AliasAction):
            yield key, action, setting


def _value(action: argparse.Action, given: object, place: str) -> Any:
    """The value that argparse would return for this flag with ``given`` as its argument."""
    if action.nargs == 0:
        return _switched(action, given, place)
    if _repeats(action):
        if not isinstance(given, list):
            raise ConfigError(f"{place}: must be a list")
        takes_tables = isinstance(action, TablesAction)
        return [
            item if takes_tables and isinstance(item, dict) else _single(action, item, place)
            for item in given
        ]
    if isinstance(given, list) and _takes_lists(action):
        return [value for item in given for value in _single(action, item, place)]
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
    """Whether each argument of the flag is one item of a list."""
    return isinstance(action.default, list) and not _takes_lists(action)


def _takes_lists(action: argparse.Action) -> bool:
    """Whether each argument of the flag is a list in itself."""
    return action.type in LIST_TYPES
