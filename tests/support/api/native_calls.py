"""Calls as the models' native formats write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Write = Callable[[str, dict[str, Any]], str]


def _xml(start: str, item: str, end: str) -> Write:
    def write(name: str, arguments: dict[str, Any]) -> str:
        items = "".join(
            item.format(key=key, value=_plain(value)) for key, value in arguments.items()
        )
        return start.format(name=name) + items + end

    return write


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _gemma(name: str, arguments: dict[str, Any]) -> str:
    return f"call:{name}{{{','.join(_gemma_item(*item) for item in arguments.items())}}}"


def _gemma_item(key: str, value: Any) -> str:
    return f"{key}:{_gemma_value(value)}"


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(_gemma_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(_gemma_item(*item) for item in value.items())}}}"
    return json.dumps(value)


def _mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def _kimi(name: str, arguments: dict[str, Any]) -> str:
    encoded = json.dumps(arguments, ensure_ascii=False)
    return (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{encoded}"
        "<|tool_call_end|>"
    )


@dataclass(frozen=True)
class Form:
    """The native format of a family's calls.

    Attributes:
        write: gives a call's text, from its name and arguments.
        start, end: the text around all calls of a block.
        between: the text between calls of a block; None if a block has one call.
    """

    write: Write
    start: str
    between: str | None
    end: str


FORMS = {
    "json_tools": Form(
        lambda name, arguments: json.dumps({"name": name, "arguments": arguments}),
        "<tool_call>\n",
        None,
        "\n</tool_call>",
    ),
    "qwen3_coder": Form(
        _xml("<function={name}>\n", "<parameter={key}>\n{value}\n</parameter>\n", "</function>"),
        "<tool_call>\n",
        None,
        "\n</tool_call>",
    ),
    "pythonic": Form(_python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "mistral": Form(_mistral, "[TOOL_CALLS]", "", ""),
    "glm47": Form(
        _xml("{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n", ""),
        "<tool_call>",
        None,
        "</tool_call>",
    ),
    "minimax_m2": Form(
        _xml(
            '<invoke name="{name}">\n', '<parameter name="{key}">{value}</parameter>\n', "</invoke>"
        ),
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
    ),
    "muse_spark": Form(
        _xml(
            '<atem:invoke name="{name}">\n',
            '<atem:parameter name="{key}">{value}</atem:parameter>\n',
            "</atem:invoke>",
        ),
        "<atem:function_calls>\n",
        "\n",
        "\n</atem:function_calls>",
    ),
    "gemma4": Form(_gemma, "<|tool_call>", None, "<tool_call|>"),
    "function_gemma": Form(
        lambda name, arguments: _gemma(name, arguments).replace('<|"|>', "<escape>"),
        "<start_function_call>",
        None,
        "<end_function_call>",
    ),
    "kimi_k2": Form(_kimi, "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "longcat": Form(
        _xml(
            "{name}\n",
            "<longcat_arg_key>{key}</longcat_arg_key>\n"
            "<longcat_arg_value>{value}</longcat_arg_value>\n",
            "",
        ),
        "<longcat_tool_call>",
        None,
        "</longcat_tool_call>",
    ),
    "minicpm5": Form(
        _xml('{name}">', '<param name="{key}">{value}</param>', ""),
        '<function name="',
        None,
        "</function>",
    ),
    "kimi_k3": Form(
        _xml(
            '<|open|>call tool="{name}" index="1"<|sep|>',
            '<|open|>argument key="{key}" type="string"<|sep|>{value}<|close|>argument<|sep|>',
            "<|close|>call<|sep|>",
        ),
        "<|open|>tools<|sep|>\n",
        "\n",
        "\n<|close|>tools<|sep|>",
    ),
}


def block(parser: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The text of calls, from their names and arguments, in the format of mlx-lm's parser."""
    form = FORMS[parser]
    written = [form.write(name, arguments) for name, arguments in calls]
    if form.between is None:
        return "".join(form.start + call + form.end for call in written)
    return form.start + form.between.join(written) + form.end
