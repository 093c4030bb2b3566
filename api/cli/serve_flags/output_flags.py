"""The flags of ``serve`` for the content of replies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from chairlift.api.cli.arguments.template import syntax_error
from chairlift.api.cli.flags import whole
from chairlift.api.settings import ServerSettings
from chairlift.api.text.chat_format import JSON_FORM, ThinkTags, parser_names
from chairlift.api.text.harmony import HARMONY

_DEFAULTS = ServerSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the group "Output"."""
    add = parser.add_argument_group("Output").add_argument
    names = [*parser_names(), HARMONY, JSON_FORM]
    add(
        "--tool-parser",
        choices=names,
        metavar="NAME",
        help=f"format of the model's tool calls: one of mlx-lm's {', '.join(names[:-2])}; "
        f"{HARMONY}: gpt-oss's channels; or {JSON_FORM}: JSON calls as described in the prompt, "
        "whatever the model's own format is "
        f"(default: the format of its chat template, else {JSON_FORM})",
    )
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="Jinja template that turns chats into prompts (default: the model's own)",
    )
    add(
        "--seed",
        type=whole,
        metavar="N",
        help="starting value of the sequence of seeds for requests that have none, in the order "
        "of their arrival: after a restart, the same requests get the same replies, but two equal "
        "requests in a row get different ones (default: a random sequence)",
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
    """The fields of ``ServerSettings`` for these flags.

    Raises:
        ValueError: the chat template cannot be read, or is none.
    """
    return {
        "chat_template": _chat_template(options.chat_template),
        "seed": options.seed,
        "tool_parser": options.tool_parser,
        "think_tags": options.think_tags,
        "embedding_pooling": options.embedding_pooling,
    }


def _chat_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--chat-template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template {path}: not a text in UTF-8") from error
    if (wrong := syntax_error(text)) is not None:
        raise ValueError(f"--chat-template {path}: {wrong}")
    return text


def _think_tags(text: str) -> ThinkTags:
    tags = text.split()
    if len(tags) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two tags with a blank between them")
    return ThinkTags(*tags)
