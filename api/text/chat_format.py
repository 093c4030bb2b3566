"""The tags with which a model marks reasoning and calls, as mlx-lm derives them from its tokenizer.

A stretch of reasoning is called a thought.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.api.text.harmony import (
    ANALYSIS_HEADER,
    FINAL_HEADER,
    HARMONY,
    REPLY_START,
    HarmonyTokens,
    harmony_tokens,
)
from chairlift.api.text.inner_ids import inner_ids
from chairlift.engine.errors import ModelError

# mlx-lm's names for the states of a reply's text. A model may have other states, whose text is
# for the user.
NORMAL, THOUGHT, CALL = "normal", "reasoning", "tool"
# The state of a reply in a header of the Harmony format, whose text is not delivered.
HEADER = "harmony header"

# mlx-lm's parser of calls that are JSON objects, as Hermes models write them.
JSON_TOOLS = "json_tools"
# The value of --tool-parser that replaces the model's native format by our JSON form.
JSON_FORM = "json"

# The tags of the JSON form. Many models were trained on these and have them as tokens, whatever
# their template uses.
FORM_START, FORM_END = "<tool_call>", "</tool_call>"

# It takes a call's text and the tools in OpenAI's format, returns one call (with "name" and
# "arguments") or a list of them, and may raise anything.
ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], object]


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag around a thought or a call. ``token`` is its id if it is a single token."""

    text: str
    token: int | None = None


class ThinkTags(NamedTuple):
    """The tags around a thought as set by ``--think-tags``."""

    start: str
    end: str

    def __str__(self) -> str:
        return f"{self.start} {self.end}"


# The value of --think-tags that names gpt-oss's format. Its messages may end in other ways, too.
HARMONY_TAGS = ThinkTags(ANALYSIS_HEADER, "<|end|>")


class Transition(NamedTuple):
    """In ``state``, the tag ``tag`` switches to the state ``target``."""

    state: str
    tag: Tag
    target: str


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tags around a thought, and the token ids of each."""

    start: Tag
    end: Tag
    start_tokens: tuple[int, ...]
    end_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The tags around a call's text, and its parser.

    If ``end`` is empty, a call lasts to the end of the reply.
    """

    start: Tag
    end: Tag
    parser_name: str
    parse: ToolParser


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The tags in a model's replies, and its chat template.

    Attributes:
        thoughts: the tags around thoughts, or None for a model without them.
        calls: the native format of calls, or None for a model without one.
        form: the tags before and after a call in the JSON form.
        template: the chat template's text; empty if the template is Python code.
        initial: the state in which a reply begins, or None if the prompt decides.
        transitions: further transitions, of models that mark more than thoughts and calls.
        harmony: the tokens of gpt-oss's format, or None for a model with tags.
    """

    thoughts: Thoughts | None
    calls: CallFormat | None
    form: tuple[Tag, Tag]
    template: str = ""
    initial: str | None = None
    transitions: tuple[Transition, ...] = ()
    harmony: HarmonyTokens | None = None

    def knows(self, word: str) -> bool:
        """Whether the template mentions a message field or role of that name."""
        return word in self.template


def parser_names() -> list[str]:
    """The names of mlx-lm's tool parsers, found without importing mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    places = [Path(place) / "tool_parsers" for place in spec.submodule_search_locations or ()]
    return sorted(p.stem for place in places for p in place.glob("[a-z]*.py"))


def chat_format(
    tokenizer: Any, tool_parser: str | None = None, think_tags: ThinkTags | None = None
) -> ChatFormat:
    """The chat format that mlx-lm derives from its TokenizerWrapper ``tokenizer``.

    ``tool_parser`` and ``think_tags`` override parts of it.

    Raises:
        ModelError: mlx-lm has no parser of that name, or the model has another format.
    """
    template = tokenizer.chat_template
    tokens = harmony_tokens(tokenizer)
    if tokens is not None:
        return _harmony_format(tokens, template, tool_parser, think_tags)
    return ChatFormat(
        _thoughts(tokenizer, think_tags),
        _calls(tokenizer, tool_parser),
        (_tag(tokenizer, FORM_START), _tag(tokenizer, FORM_END)),
        template if isinstance(template, str) else "",
        tokenizer.response_initial_state,
        tuple(_transitions(tokenizer)),
    )


def _harmony_format(
    tokens: HarmonyTokens, template: object, tool_parser: str | None, tags: ThinkTags | None
) -> ChatFormat:
    for flag, value, only in (
        ("--tool-parser", tool_parser, HARMONY),
        ("--think-tags", tags, HARMONY_TAGS),
    ):
        if value not in (None, only):
            raise ModelError(f"{flag} {value}: this model writes calls and reasoning in Harmony")
    # Only the token ids of its tags are used, and none of its tags for calls.
    none = Tag("")
    return ChatFormat(
        Thoughts(
            Tag(ANALYSIS_HEADER),
            Tag(f"<|end|>{REPLY_START}{FINAL_HEADER}"),
            tokens.analysis,
            (*tokens.next_reply, *tokens.final),
        ),
        CallFormat(none, none, HARMONY, _no_parser),
        (none, none),
        template if isinstance(template, str) else "",
        harmony=tokens,
    )


def _no_parser(text: str, tools: Sequence[Mapping[str, Any]]) -> object:
    raise ValueError("calls in Harmony have a parser of their own")


def _tag(tokenizer: Any, text: str) -> Tag:
    return Tag(text, tokenizer.get_vocab().get(text))


def _thoughts(tokenizer: Any, tags: ThinkTags | None) -> Thoughts | None:
    if tags is not None:
        start, end = tags
        starts = tuple(tokenizer.encode(start, add_special_tokens=False))
        ends = tuple(inner_ids(tokenizer, end))
    elif tokenizer.has_thinking:
        start, end = tokenizer.think_start, tokenizer.think_end
        starts, ends = tokenizer.think_start_tokens, tokenizer.think_end_tokens
    else:
        return None
    return Thoughts(_tag(tokenizer, start), _tag(tokenizer, end), starts, ends)


def _calls(tokenizer: Any, name: str | None) -> CallFormat | None:
    if name == JSON_FORM:
        return None
    if name == HARMONY:
        raise ModelError(f"--tool-parser {name}: the model's vocabulary lacks its tokens")
    if name is not None:
        try:
            module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
        except ImportError as error:
            raise ModelError(f"--tool-parser {name}: mlx-lm has no such parser") from error
        start, end, parse = module.tool_call_start, module.tool_call_end, module.parse_tool_call
    elif tokenizer.has_tool_calling:
        name = tokenizer.init_kwargs.get("tool_parser_type", "")
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        parse = tokenizer.tool_parser
    else:
        return None
    return CallFormat(_tag(tokenizer, start), _tag(tokenizer, end), name, parse)


def _transitions(tokenizer: Any) -> Iterator[Transition]:
    for marker in tokenizer.structural_markers:
        yield Transition(NORMAL, _tag(tokenizer, marker), NORMAL)
    for state, edges in tokenizer.response_transitions.items():
        for text, target in edges:
            yield Transition(state, _tag(tokenizer, text), target)
