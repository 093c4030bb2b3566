"""Calls in gpt-oss's Harmony format: their parser, and the grammar that demands them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from chairlift.api.chat.calls import new_id
from chairlift.api.chat.tool_grammar import function_schema, json_reply
from chairlift.api.schemas.structured import GrammarRequest
from chairlift.api.schemas.tools import Function
from chairlift.api.text.choice import CallDelta, CallOpening
from chairlift.api.text.harmony import MESSAGE, NAMESPACE, HarmonyTokens, parse_header
from chairlift.engine.messages import Grammar


class HarmonyCallParser:
    """Parses messages to functions while they arrive: a header, and JSON arguments as content.

    Args:
        names: the functions that can be called.
    """

    in_string = False

    def __init__(self, names: Collection[str]) -> None:
        self.rest = ""
        self._names = names
        self._count = 0
        self.begin()

    def begin(self) -> None:
        self.rest = ""
        self._name: str | None = None
        self._has_begun = False

    def add(self, text: str) -> list[CallDelta]:
        if self._name is None:
            self.rest += text
            header, found, text = self.rest.partition(MESSAGE)
            recipient = parse_header(header).recipient or ""
            name = recipient.removeprefix(NAMESPACE)
            if not found or name not in self._names:
                return []
            self._name, self.rest = name, ""
        # A call that is cut here is left out: clients take no arguments for complete ones.
        if not self._has_begun and not (text := text.lstrip()):
            return []
        return [*self._opened(), CallDelta(self._count - 1, None, text)] if text else []

    def end(self, cut: bool) -> list[CallDelta] | None:
        if self._name is None:
            return None
        if self._has_begun or cut:
            return []
        return [*self._opened(), CallDelta(self._count - 1, None, "{}")]

    def _opened(self) -> list[CallDelta]:
        if self._has_begun or self._name is None:
            return []
        self._has_begun = True
        self._count += 1
        return [CallDelta(self._count - 1, CallOpening(new_id(short=False), self._name), "")]


def harmony_grammar(
    functions: Sequence[Function],
    tokens: HarmonyTokens,
    *,
    required: bool,
    reply: GrammarRequest | None,
) -> Grammar:
    """A grammar of one call or, unless ``required``, a reply in the final channel.

    It applies from ``<|start|>assistant`` on.

    Args:
        functions: the functions that may be called.
        tokens: the format's tokens.
        required: whether the reply must be a call.
        reply: the grammar of a reply without a call; None means that ``required`` is set.

    Raises:
        RequestError: a function's parameters are not an object, or ``reply`` is neither JSON nor a
            choice.
    """
    calls = " | ".join(f"function_{number}" for number in range(len(functions)))
    channel, message = f"<[{tokens.channel}]>", f"<[{tokens.message}]>"
    constrain = "" if tokens.constrain is None else f"<[{tokens.constrain}]>"
    rules = [f"start: {calls}" if required or reply is None else f"start: {calls} | final"]
    if not required and reply is not None:
        rules += [f'final: {channel} "final" {message} reply', f"reply: {json_reply(reply)}"]
    for number, function in enumerate(functions):
        rules.append(
            f'function_{number}: {channel} "commentary to={NAMESPACE}{function.name} " '
            f'{constrain} "json" {message} arguments_{number}'
        )
        rules.append(f"arguments_{number}: %json {function_schema(function)}")
    return Grammar("lark", "\n".join(rules) + "\n")
