"""The flags of ``serve`` that say what format a model's replies have."""

from __future__ import annotations

import argparse
from typing import Any

from chairlift.api.text.chat_format import JSON_FORM, ThinkTags, parser_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them in a group of their own."""
    add = parser.add_argument_group("replies").add_argument
    names = [*parser_names(), JSON_FORM]
    add(
        "--tool-parser",
        choices=names,
        metavar="NAME",
        help=f"the format of the model's calls: mlx-lm's {', '.join(names[:-1])}; or {JSON_FORM}: "
        "in JSON, as we tell the model, whatever its own format is (default: what goes with its "
        f"chat template, else {JSON_FORM})",
    )
    add(
        "--think-tags",
        type=_think_tags,
        metavar="TAGS",
        help="what begins and what ends the model's thoughts, with a blank between them, like "
        "'<think> </think>' (default: what mlx-lm finds in its vocabulary)",
    )


def format_settings(options: argparse.Namespace) -> dict[str, Any]:
    """ServerSettings' fields that these flags give."""
    return {"tool_parser": options.tool_parser, "think_tags": options.think_tags}


def _think_tags(text: str) -> ThinkTags:
    tags = text.split()
    if len(tags) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two tags with a blank between them")
    return ThinkTags(*tags)
