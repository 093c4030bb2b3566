"""The flags of ``serve`` for the content of replies."""

from __future__ import annotations

import argparse
from typing import Any

from chairlift.api.settings import ServerSettings
from chairlift.api.text.chat_format import JSON_FORM, ThinkTags, parser_names

_DEFAULTS = ServerSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Output"."""
    add = parser.add_argument_group("Output").add_argument
    names = [*parser_names(), JSON_FORM]
    add(
        "--tool-parser",
        choices=names,
        metavar="NAME",
        help=f"format of the model's tool calls: one of mlx-lm's {', '.join(names[:-1])}; or "
        f"{JSON_FORM}: JSON calls as described in the prompt, whatever the model's own format is "
        f"(default: the format of its chat template, else {JSON_FORM})",
    )
    add(
        "--think-tags",
        type=_think_tags,
        metavar="TAGS",
        help="the tags that begin and end the model's reasoning, separated by a space, like "
        "'<think> </think>' (default: the pair that mlx-lm finds in its vocabulary)",
    )
    add(
        "--embedding-pooling",
        choices=("mean", "last"),
        default=_DEFAULTS.embedding_pooling,
        help="pooling of /v1/embeddings for requests that name none: the mean of all tokens' "
        "hidden states, or the last token's (default: %(default)s)",
    )


def output_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``ServerSettings`` for these flags."""
    return {
        "tool_parser": options.tool_parser,
        "think_tags": options.think_tags,
        "embedding_pooling": options.embedding_pooling,
    }


def _think_tags(text: str) -> ThinkTags:
    tags = text.split()
    if len(tags) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two tags with a blank between them")
    return ThinkTags(*tags)
