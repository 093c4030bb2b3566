"""Plans the model's reasoning before a reply, called thought, and its token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from chairlift.api.schemas.schemas import ChatRequest
from chairlift.api.schemas.templating import Templating
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
    """

    prompt: list[int]
    begun: bool
    thinking: Thinking | None


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
        RequestError: there is a thinking budget, but the model marks no thoughts.
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
        content = request.messages[-1].content
        begun, over = content.rfind(start) > content.rfind(end), True
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
