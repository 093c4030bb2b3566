"""Writes docs/reference/flags.md from the parser of ``chairlift serve``.

``python -m chairlift.api.cli.reference > docs/reference/flags.md``
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator

from chairlift.api.cli import serve
from chairlift.api.cli.arguments.config_sources import PREFIX

_HEAD = """\
# Flags of `chairlift serve`

Generated from the command's own parser by `python -m chairlift.api.cli.reference`; a test
compares this page with the code.

Every flag can also be set by an environment variable and in a TOML file: `--max-rows 8` is
`{prefix}MAX_ROWS=8` or `max-rows = 8` in the file that `--config` names. A flag overrides the
environment, and the environment overrides the file. `chairlift serve --print-config` prints all
values and the source of each. [Commands](../guides/commands.md) describes the formats.

Other users of a machine can read a process's flags: prefer `{prefix}API_KEY` or `--api-key-file`
to `--api-key`. `{prefix}CACHE` is the folder for downloads, and `{prefix}BLAS` the BLAS library to
load.
"""
# A default at the end of a help text; it moves to a separate column.
_DEFAULT = re.compile(r"\s*\(default: (.*)\)$", re.DOTALL)


def page() -> str:
    """The whole page, in Markdown."""
    parser = argparse.ArgumentParser(prog="chairlift serve", add_help=False)
    serve.add_arguments(parser)
    lines = [_HEAD.format(prefix=PREFIX)]
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help is not argparse.SUPPRESS]
        if actions:
            lines.extend(_table(group.title or "", actions))
    return "\n".join(lines)


def _table(title: str, actions: Iterable[argparse.Action]) -> Iterator[str]:
    yield f"## {title[:1].upper()}{title[1:]}\n"
    yield "| flag | meaning | default |"
    yield "|---|---|---|"
    for action in actions:
        meaning, default = _described(action)
        yield f"| {_spelling(action)} | {_escaped(meaning)} | {_escaped(default)} |"
    yield ""


def _spelling(action: argparse.Action) -> str:
    """The flag and its value, like ``--max-rows N``, each of its names in backticks."""
    if not action.option_strings:
        return f"`{action.dest}`"
    value = ""
    if action.nargs != 0:
        choices = action.choices and "{" + ",".join(map(str, action.choices)) + "}"
        metavar = action.metavar or choices or action.dest.upper()
        value = f" {metavar}"
    return ", ".join(f"`{name}{value}`" for name in action.option_strings)


def _described(action: argparse.Action) -> tuple[str, str]:
    """The meaning, and the default from the help text or else from the parser."""
    text = (action.help or "") % {"default": action.default, "prog": "chairlift"}
    text = text or action.dest.replace("_", " ")
    match = _DEFAULT.search(text)
    if match is not None:
        return text[: match.start()], match[1]
    if action.default is None or action.default is argparse.SUPPRESS:
        return text, "none"
    if action.default is False:
        return text, "off"
    return text, str(action.default)


def _escaped(text: str) -> str:
    """The text as a cell of a Markdown table: flags in backticks, special characters escaped."""
    text = re.sub(r"(?<![\w`-])(--[a-z][a-z-]+)", r"`\1`", text)
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(page(), end="")
