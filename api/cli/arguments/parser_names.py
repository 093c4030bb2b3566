"""vLLM's names for parsers of tool calls and of reasoning, and their counterparts here."""

from __future__ import annotations

import argparse

from chairlift.api.text.chat_format import (
    HARMONY_TAGS,
    JSON_FORM,
    JSON_TOOLS,
    ThinkTags,
    parser_names,
)
from chairlift.api.text.harmony import HARMONY

# vLLM's parsers whose format one of mlx-lm's parsers or ours reads. Where both have the same name,
# none is listed.
TOOL_PARSERS = {
    "hermes": JSON_TOOLS,
    "functiongemma": "function_gemma",
    "glm45": "glm47",
    "lfm2": "pythonic",
    "mimo": "qwen3_coder",
    "openai": HARMONY,
    "qwen3_xml": "qwen3_coder",
}

# Calls without tags in vLLM, and with those of LFM2 in mlx-lm.
_OTHERS = {"pythonic"}

_THINK = ThinkTags("<think>", "</think>")
REASONING_PARSERS = {
    **dict.fromkeys(
        (
            *("deepseek_r1", "deepseek_v3", "ernie45", "glm45", "glm47", "holo2", "kimi_k2"),
            *("mimo", "minimax_m2", "nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
        ),
        _THINK,
    ),
    "openai_gptoss": HARMONY_TAGS,
    "gemma4": ThinkTags("<|channel>thought", "<channel|>"),
    "mistral": ThinkTags("[THINK]", "[/THINK]"),
    "seed_oss": ThinkTags("<seed:think>", "</seed:think>"),
}


def tool_parser(text: str) -> str:
    """The value of ``--tool-parser`` for a name of vLLM's, mlx-lm's or our own.

    Raises:
        ArgumentTypeError: there is no such parser here.
    """
    ours = {*parser_names(), HARMONY, JSON_FORM} - _OTHERS
    name = TOOL_PARSERS.get(text, text)
    if name not in ours and text not in TOOL_PARSERS:
        names = ", ".join(sorted({*TOOL_PARSERS, *ours}))
        raise argparse.ArgumentTypeError(
            f"no parser of tool calls is called {text!r}; there are {names}; {JSON_FORM} works "
            "with every model"
        )
    return name


def reasoning_tags(text: str) -> ThinkTags:
    """The tags around reasoning that vLLM's parser of this name looks for.

    Raises:
        ArgumentTypeError: the parser is unknown, or looks for something else than tags.
    """
    if text not in REASONING_PARSERS:
        raise argparse.ArgumentTypeError(
            f"no parser of reasoning is called {text!r}; there are "
            f"{', '.join(sorted(REASONING_PARSERS))}; --think-tags takes any pair of tags"
        )
    return REASONING_PARSERS[text]
