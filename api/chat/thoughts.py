"""The thought that may go before a reply: whether there is one, and how long it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.schemas.templating import Templating
from chairlift.engine.errors import RequestError
from chairlift.engine.messages import Thinking

if TYPE_CHECKING:  # it imports transformers, which takes a second
    from chairlift.api.text.vocabulary import Vocabulary

# What clients say for "do not think", and templates know as a switch.
_NO_EFFORT = "none"
_SWITCH = "enable_thinking"


class ThoughtPlan(NamedTuple):
    """``prompt`` is the prompt; ``begun``: it has begun a thought.

    ``thinking`` is what the engine has to know of it, None if that is nothing.
    """

    prompt: list[int]
    begun: bool
    thinking: Thinking | None


def template_settings(request: Templating) -> dict[str, object]:
    """The settings of the template: those given, and what says how much to think."""
    effort: dict[str, object] = {}
    if request.reasoning_effort is not None:
        effort["reasoning_effort"] = request.reasoning_effort
        if request.reasoning_effort == _NO_EFFORT:
            effort[_SWITCH] = False
    return effort | request.chat_template_kwargs


def thought_plan(
    request: ChatRequest, vocabulary: Vocabulary, prompt: list[int], is_held: bool
) -> ThoughtPlan:
    """What becomes of the thought that the prompt leads to, which no grammar holds for.

    ``is_held``: a grammar holds for the reply.

    Raises:
        RequestError: there is a budget, and no thought that could have one.
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
    start, end = thoughts.start.text, thoughts.end.text
    if request.continue_final_message:
        said = request.messages[-1].content
        begun, over = said.rfind(start) > said.rfind(end), True
    else:
        tail = vocabulary.tail(prompt)
        begun = tail.endswith(start)
        over = tail.endswith(end) or template_settings(request).get(_SWITCH) is False
    if (over and not begun) or (budget is None and not is_held):
        return ThoughtPlan(prompt, begun, None)
    first = None if begun else thoughts.start.token
    if not begun and first is None:
        # The engine can wait for one token, not for several: the thought is begun for the model.
        return ThoughtPlan(
            [*prompt, *thoughts.start_tokens], True, Thinking(thoughts.end_tokens, budget)
        )
    return ThoughtPlan(prompt, begun, Thinking(thoughts.end_tokens, budget, first))
