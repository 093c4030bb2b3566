"""How a model's replies mark thoughts and calls, as mlx-lm knows it from the tokenizer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.engine.errors import ModelError

# mlx-lm's names of what a reply's text can be; a model may have others, which are text for the
# user.
NORMAL, THOUGHT, CALL = "normal", "reasoning", "tool"

# The parser of calls that are JSON objects, as Hermes wrote them.
JSON_TOOLS = "json_tools"
# Instead of a parser's name: the model's own format is not used, but our JSON form.
JSON_FORM = "json"

# Its tags. Many models have seen these, and have them as tokens, whatever their template says.
FORM_START, FORM_END = "<tool_call>", "</tool_call>"

# Takes a call's text and the tools in OpenAI's form; gives a call (its "name" and "arguments") or
# several, or raises anything.
ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], object]


@dataclass(frozen=True, slots=True)
class Tag:
    """What begins or ends a thought or a call. ``token`` is its id where it is one token."""

    text: str
    token: int | None = None


class ThinkTags(NamedTuple):
    """What an operator says begins and ends a thought."""

    start: str
    end: str

    def __str__(self) -> str:
        return f"{self.start} {self.end}"


class Passage(NamedTuple):
    """``tag`` ends what ``state`` is, and begins what ``target`` is."""

    state: str
    tag: Tag
    target: str


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tags around a thought; ``end_tokens`` are the ids of the one that ends it."""

    start: Tag
    end: Tag
    start_tokens: tuple[int, ...]
    end_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The tags around a call's text, and what reads it. An empty ``end`` is the reply's."""

    start: Tag
    end: Tag
    parser_name: str
    parse: ToolParser


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """``thoughts`` and ``calls`` are None of a model that marks none.

    ``form`` are the tags of the JSON form. ``template`` is the chat template's text, empty where
    it is code. ``initial`` is what a reply begins as, None where the prompt decides. ``passages``
    are those of models that mark more than thoughts and calls.
    """

    thoughts: Thoughts | None
    calls: CallFormat | None
    form: tuple[Tag, Tag]
    template: str = ""
    initial: str | None = None
    passages: tuple[Passage, ...] = ()

    def knows(self, word: str) -> bool:
        """Whether the template reads a message's field, or a role, of that name."""
        return word in self.template


def parser_names() -> list[str]:
    """mlx-lm's tool parsers, without importing it."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    places = [Path(place) / "tool_parsers" for place in spec.submodule_search_locations or ()]
    return sorted(p.stem for place in places for p in place.glob("[a-z]*.py"))


def chat_format(
    tokenizer: Any, tool_parser: str | None = None, think_tags: ThinkTags | None = None
) -> ChatFormat:
    """The format that goes with mlx-lm's TokenizerWrapper, or what the operator says instead.

    Raises:
        ModelError: mlx-lm has no parser of that name.
    """
    template = tokenizer.chat_template
    return ChatFormat(
        _thoughts(tokenizer, think_tags),
        _calls(tokenizer, tool_parser),
        (_tag(tokenizer, FORM_START), _tag(tokenizer, FORM_END)),
        template if isinstance(template, str) else "",
        tokenizer.response_initial_state,
        tuple(_passages(tokenizer)),
    )


def _tag(tokenizer: Any, text: str) -> Tag:
    return Tag(text, tokenizer.get_vocab().get(text))


def _thoughts(tokenizer: Any, tags: ThinkTags | None) -> Thoughts | None:
    if tags is not None:
        start, end = tags
        starts = tuple(tokenizer.encode(start, add_special_tokens=False))
        ends = tuple(tokenizer.encode(end, add_special_tokens=False))
    elif tokenizer.has_thinking:
        start, end = tokenizer.think_start, tokenizer.think_end
        starts, ends = tokenizer.think_start_tokens, tokenizer.think_end_tokens
    else:
        return None
    return Thoughts(_tag(tokenizer, start), _tag(tokenizer, end), starts, ends)


def _calls(tokenizer: Any, name: str | None) -> CallFormat | None:
    if name == JSON_FORM:
        return None
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


def _passages(tokenizer: Any) -> Iterator[Passage]:
    for marker in tokenizer.structural_markers:
        yield Passage(NORMAL, _tag(tokenizer, marker), NORMAL)
    for state, edges in tokenizer.response_transitions.items():
        for text, target in edges:
            yield Passage(state, _tag(tokenizer, text), target)
