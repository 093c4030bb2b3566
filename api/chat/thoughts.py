"""Plans the model's reasoning before a reply, called thought, and its token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.schemas.templating import Templating
from chairlift.api.text.chat_format import ChatFormat, Thoughts
from chairlift.api.text.harmony import HarmonyTokens
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import Thinking

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary

# The reasoning effort that turns reasoning off, and the template's switch for that.
_NO_EFFORT = "none"
_SWITCH = "enable_thinking"


class ThoughtPlan(NamedTuple):
    """The prompt of a reply that may begin with a thought.

    Attributes:
        prompt: the token ids.
        begun: whether the prompt ends inside a thought.
        thinking: how the engine recognizes the end of the thought, and its budget; None if the
            engine need not know.
        in_text: whether the prompt ends inside the text for the user. Only models with Harmony's
            channels need to know.
    """

    prompt: list[int]
    begun: bool
    thinking: Thinking | None
    in_text: bool = False


def template_settings(request: Templating) -> dict[str, object]:
    """The template's settings: those of the request, and its reasoning effort."""
    effort: dict[str, object] = {}
    if request.reasoning_effort is not None:
        effort["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == _NO_EFFORT:
            effort[_SWITCH] = False
    return effort | request.chat_template_kwargs


def thought_plan(
    request: ChatRequest, vocabulary: Vocabulary, prompt: list[int], is_constrained: bool
) -> ThoughtPlan:
    """Plans the thought that may follow ``prompt``.

    ``is_constrained`` is whether the reply must follow a grammar. The grammar does not apply to the
    thought, so the engine must know where the thought ends.

    Raises:
        RequestError: there is a thinking budget, but the model marks no thoughts; or the reply
            cannot be both a call and the rest of a message.
    """
    thoughts = vocabulary.format.thoughts
    budget = request.thinking_token_budget
    if thoughts is None:
        if budget is not None:
            raise RequestError(
                "thinking_token_budget: this model does not mark its thoughts",
                "thinking_token_budget",
            )
        return ThoughtPlan(prompt, False, None)
    if vocabulary.format.harmony is not None:
        return _harmony_plan(request, vocabulary.format.harmony, prompt, is_constrained)
    start, end = thoughts.start.text, thoughts.end.text
    if request.continue_final_message:
        begun, over = _ends_inside(request.messages[-1].content, thoughts), True
    else:
        tail = vocabulary.tail(prompt)
        begun = tail.endswith(start)
        over = tail.endswith(end) or template_settings(request).get(_SWITCH) is False
    if (over and not begun) or (budget is None and not is_constrained):
        return ThoughtPlan(prompt, begun, None)
    first = None if begun else thoughts.start.token
    if not begun and first is None:
        # The engine can recognize a start tag of one token only: begin the thought in the prompt.
        return ThoughtPlan(
            [*prompt, *thoughts.start_tokens], True, Thinking(thoughts.end_tokens, budget)
        )
    return ThoughtPlan(prompt, begun, Thinking(thoughts.end_tokens, budget, first))


def continued_text(request: ChatRequest, format: ChatFormat) -> str:
    """The text for the user that the reply continues, without a thought before it.

    Empty if the reply is a new message, or begins in a thought or right after one.
    """
    if not request.continue_final_message:
        return ""
    content, thoughts = request.messages[-1].content, format.thoughts
    if thoughts is None or format.harmony is not None:
        return content
    if _ends_inside(content, thoughts):
        return ""
    _, end, text = content.rpartition(thoughts.end.text)
    return text.lstrip("\n") if end else content


def _ends_inside(content: str, thoughts: Thoughts) -> bool:
    return content.rfind(thoughts.start.text) > content.rfind(thoughts.end.text)


def _harmony_plan(
    request: ChatRequest, tokens: HarmonyTokens, prompt: list[int], is_constrained: bool
) -> ThoughtPlan:
    """The plan for gpt-oss's format, in which a thought is a message of its own.

    A grammar of calls begins at the header of the message after the thought, another grammar at the
    text of the final channel. Without a grammar, the budget ends the message.

    Raises:
        RequestError: the reply continues a text, but must be a call, which is another message.
    """
    if request.continue_final_message:
        if request.effective_choice.mode == "required":
            raise RequestError(
                "tool_choice: a call is a message of its own, so it cannot continue the last one",
                "tool_choice",
            )
        return ThoughtPlan(prompt, False, None, in_text=True)
    has_calls = bool(request.callable_tools)
    if template_settings(request).get(_SWITCH) is False:
        if is_constrained and not has_calls:
            return ThoughtPlan([*prompt, *tokens.final], False, None, in_text=True)
        return ThoughtPlan(prompt, False, None)
    budget = request.thinking_token_budget
    if budget is None and not is_constrained:
        return ThoughtPlan(prompt, False, None)
    end: tuple[int, ...] = (tokens.end,)
    if is_constrained:
        end = tokens.next_reply if has_calls else (*tokens.next_reply, *tokens.final)
    return ThoughtPlan([*prompt, *tokens.analysis], True, Thinking(end, budget))
