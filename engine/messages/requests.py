"""Messages to the engine: requests, their parameters, aborts."""

from __future__ import annotations

from typing import Literal

import msgspec

from chairlift.engine.messages.images import PromptImage
from chairlift.engine.messages.outputs import FinishReason

# The pooling of a prompt's last hidden states into one vector: their mean, or the last one.
Pooling = Literal["mean", "last"]

# Priorities are whole numbers from -MAX_PRIORITY to MAX_PRIORITY; lower ones are served first.
MAX_PRIORITY = 100


class Grammar(msgspec.Struct, frozen=True):
    """The formal language that an output has to belong to.

    Attributes:
        text: a JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark's
            notation as llguidance reads it, according to ``kind``. Empty for "json_object".
        begun: the beginning of a text in that language, which is in the prompt. The output is the
            rest of it.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    text: str = ""
    begun: str = ""


class Thinking(msgspec.Struct, frozen=True):
    """The thought before a reply. A grammar constrains only what follows it.

    Attributes:
        end: the token ids that end the thought, at least one.
        budget: after this many tokens ``end`` is forced; None never forces it.
        start: there is a thought only if the output begins with this token. None: the prompt has
            begun the thought.
    """

    end: tuple[int, ...]
    budget: int | None = None
    start: int | None = None


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling of one request's tokens, and the conditions for its end.

    Attributes:
        max_tokens: upper bound of output tokens. 0: only the prompt is computed.
        seed: the same seed gives the same tokens, whatever else is in the batch; choice i of n
            uses ``seed + i``.
        min_tokens: no token of ``stop_token_ids`` is chosen before this many tokens, unless the
            grammar allows nothing else.
        temperature: below 1e-5 means greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        repetition_penalty: divides the logits of all tokens seen in prompt and output; negative
            logits are multiplied.
        presence_penalty: subtracted from the logits of all tokens seen in the output.
        frequency_penalty: subtracted from these logits for each time that the token was seen.
        logit_bias: added to logits, by token id.
        logprobs: None reports none; k reports those of the chosen token and of the k most likely
            tokens. They are the model's log-probabilities before temperature, penalties and bias.
        stop_token_ids: all token ids that end the text. They include the model's end-of-text ids,
            unless these are to be ignored.
        grammar: constrains the output, or with ``thinking`` what follows the thought; None allows
            any output.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    thinking: Thinking | None = None


class Resumed(msgspec.Struct, array_like=True, frozen=True):
    """An unfinished choice of another engine, which this engine continues.

    Attributes:
        output: its tokens so far.
        cached_tokens: the request's cached prompt tokens, as reported by the other engine; 0 if
            the choice has no token yet.
        scheduled, first_token, last_token: its times so far; None if it has no token yet.
    """

    index: int
    output: list[int]
    cached_tokens: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A prompt to be continued ``n`` times.

    Attributes:
        arrival: when the server received the request.
        cache_salt: separates tenants. A prefix is shared only between requests with the same salt;
            the empty salt is one of them.
        priority: lower is served earlier.
        adapter: the key of a loaded LoRA adapter; "" is none.
        replay: the server's canary repeats a request. No user's metric counts it, and the prefix
            cache keeps nothing of it.
        resumed: the choices still to be finished; empty for a new request.
        prompt_logprobs: None reports none; k reports the log-probability of each prompt token and
            of the k most likely tokens at its position.
        pooling: asks for the model's last hidden states of the prompt, pooled into one vector.
        prediction: tokens that the output is expected to have, or most of them.
        images: the images of the prompt, in the order of their places.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    n: int = 1
    arrival: float = 0.0
    cache_salt: str = ""
    priority: int = 0
    replay: bool = False
    resumed: tuple[Resumed, ...] = ()
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    adapter: str = ""
    prediction: list[int] = []
    images: tuple[PromptImage, ...] = ()


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends one choice of a running request, or all of them.

    Attributes:
        index: the choice; None: all.
        reason: "stop" when its text contains a stop string, "abort" when the client has left.
    """

    request_id: str
    index: int | None = None
    reason: FinishReason = "abort"


class Withdraw(msgspec.Struct, tag=True, frozen=True):
    """Removes a request without reporting it, because another engine will resume it."""

    request_id: str


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Loads a LoRA adapter, which requests name by ``key``.

    Attributes:
        path: the folder of its files.
        digest: the required digest of its files; "" accepts any.
    """

    key: str
    path: str
    digest: str = ""


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Removes a LoRA adapter that no unfinished request has."""

    key: str


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Asks the engine process to end."""
