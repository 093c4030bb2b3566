"""Submits the prompts of one HTTP request to the engine, and yields the output of its choices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

from chairlift.api.admission.ratelimit import Account
from chairlift.api.errors import GenerationFailed
from chairlift.api.observe.timing import Detokenizing, PromptTimes
from chairlift.api.schemas.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from chairlift.api.schemas.schemas import GenerationRequest
from chairlift.api.service import ServedModel
from chairlift.api.text.choice import Choice, OutputDelta, TextChoice, VectorChoice
from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.stream import Detokenizer, TextStream
from chairlift.engine.client.interface import TokenStream
from chairlift.engine.messages import Pooling, PromptImage, SamplingParams, Submit, TokenOutput
from chairlift.metrics.recorder import Recorder


class ChoiceFactory(Protocol):
    """Makes the choices of replies that are more than text: a chat's thoughts and calls."""

    @property
    def thinks(self) -> bool:
        """Whether a reply may begin with a thought."""
        ...

    def new_choice(
        self,
        index: int,
        detokenizer: Callable[[], Detokenizer],
        matcher: StopMatcher,
        with_logprobs: bool,
    ) -> Choice:
        """The choice number ``index``, which has no tokens yet."""
        ...


class TokenPrompt(NamedTuple):
    """A prompt of a request.

    Attributes:
        tokens: the token ids.
        params: the sampling parameters.
        choice_factory: makes its choices; None means that they are plain text.
        prompt_logprobs: see ``Submit``.
        pooling: see ``Submit``.
        prediction: the tokens that the request predicts; None predicts none.
        images: the images of the prompt.
        ends: the tokens that end its plain text, besides the model's end of a text; without a text.
    """

    tokens: list[int]
    params: SamplingParams
    choice_factory: ChoiceFactory | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    prediction: list[int] | None = None
    images: tuple[PromptImage, ...] = ()
    ends: frozenset[int] = frozenset()

    @property
    def is_scored(self) -> bool:
        """Whether the prompt's own log-probabilities are requested."""
        return self.prompt_logprobs is not None


class _Arrived(NamedTuple):
    """Outputs of the prompt number ``prompt``."""

    prompt: int
    outputs: list[TokenOutput]


class Generation:
    """Generates n choices for each prompt of a request. ``close`` must always be called.

    Choice i of prompt p has the index p * n + i.

    Args:
        model: the model.
        recorder: records metrics.
        request: the request's fields.
        request_id: the id of the reply, and the beginning of the engine requests' ids.
        prompts: the prompts.
        priority: the priority class of all prompts.
        account: the account that usage counts against.
        at_once: the maximum number of prompts in the engine at a time; None means all.

    Attributes:
        accepted: whether the engine has accepted the first prompts.
        times: the times of each prompt submitted so far.
        choices: all choices.
    """

    def __init__(
        self,
        model: ServedModel,
        recorder: Recorder,
        request: GenerationRequest,
        request_id: str,
        prompts: Sequence[TokenPrompt],
        priority: int,
        account: Account,
        at_once: int | None = None,
    ) -> None:
        self.id = request_id
        self.created = int(time.time())
        self.model = model
        self.prompts = prompts
        self.n = request.n
        self.accepted = False
        self.times: list[PromptTimes] = []
        self.detokenizing = Detokenizing()
        self._recorder = recorder
        self._priority = priority
        self._account = account
        self._cache_salt = request.cache_salt or ""
        self._at_once = at_once
        self._arrival = 0.0
        self._streams: list[TokenStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._inbox: list[_Arrived] = []
        self._stops = Stops(request.stop)
        self.choices = [self._choice(request, index) for index in range(len(prompts) * request.n)]

    def _choice(self, request: GenerationRequest, index: int) -> Choice:
        prompt = self.prompts[index // self.n]
        if prompt.pooling is not None:
            return VectorChoice(index)
        vocabulary = self.model.vocabulary
        include = request.include_stop_str_in_output
        matcher = StopMatcher(self._stops, include, request.min_tokens)
        with_logprobs = prompt.params.logprobs is not None
        if (factory := prompt.choice_factory) is not None:
            return factory.new_choice(index, vocabulary.detokenizer, matcher, with_logprobs)
        hidden = frozenset[int]()
        if request.skip_special_tokens:
            hidden = vocabulary.hidden_ids | prompt.ends
        text = TextStream(vocabulary.detokenizer(), hidden, matcher)
        return TextChoice(index, text, with_logprobs, echoed=prompt.is_scored)

    def submit(self, arrival: float) -> None:
        """Submits the prompts to the engine; ``arrival`` is in seconds of ``time.monotonic()``.

        Raises:
            RateLimited: the account has reached a limit.
            QueueFull, EngineDead: the engine refuses a prompt; ``close`` cancels the others.
        """
        self._account.check(self._prompt_tokens, len(self.choices))
        self._arrival = arrival
        for _ in self.prompts[: self._at_once]:
            self._submit_next()
        self._account.begin(self._prompt_tokens, len(self.choices))
        self.accepted = True

    def _submit_next(self) -> None:
        number = len(self._streams)
        prompt = self.prompts[number]
        submit = Submit(
            f"{self.id}-{number}",
            prompt.tokens,
            prompt.params,
            self.n,
            self._arrival,
            self._cache_salt,
            self._priority,
            prompt_logprobs=prompt.prompt_logprobs,
            pooling=prompt.pooling,
            prediction=prompt.prediction or [],
            images=prompt.images,
        )
        self._streams.append(self.model.submit(submit))
        self.times.append(PromptTimes(self._arrival))

    async def deltas(self) -> AsyncGenerator[list[OutputDelta], None]:
        """Yields each step's new deltas, in order, until all choices have finished.

        Raises:
            EngineDead: the engine ended first.
            GenerationFailed: the engine failed a choice.
            QueueFull: the queue is full when a later prompt is submitted.
        """
        async with aclosing(self._arrivals()) as arrivals:
            async for arrived in arrivals:
                now = time.monotonic()
                deltas: list[OutputDelta] = []
                for prompt, new in arrived:
                    for output in new:
                        deltas += self._take(prompt, output, now)
                self.detokenizing.add(now)
                if deltas:
                    yield deltas
                if all(choice.finish for choice in self.choices):
                    return
        raise GenerationFailed("the engine ended this request")

    def _take(self, prompt: int, output: TokenOutput, now: float) -> Sequence[OutputDelta]:
        """The deltas of one output."""
        self.times[prompt].take(output, now)
        choice = self.choices[prompt * self.n + output.index]
        if choice.finish is not None:
            return ()  # the output was in flight when a stop string was found
        before = choice.tokens
        deltas = choice.take(output)
        taken = choice.tokens - before
        if output.accepted or output.rejected:
            choice.count_drafts(output, taken)
        self._account.spend(taken)
        if choice.finish is not None and output.finish is None:
            self._streams[prompt].stop(output.index)
        return deltas

    @property
    def waiting(self) -> int:
        """The number of outputs that have arrived but were not read yet."""
        return sum(stream.waiting for stream in self._streams) + len(self._inbox)

    @property
    def echoed_tokens(self) -> int:
        """The number of prompt tokens whose log-probabilities are part of the reply."""
        return sum(len(prompt.tokens) for prompt in self.prompts if prompt.is_scored)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def usage(self) -> Usage:
        """The token counts so far. A prompt and its cached part count once, whatever n is."""
        tokens = self._prompt_tokens
        completion = sum(choice.tokens for choice in self.choices)
        cached = sum(
            max(choice.cached_tokens for choice in self._choices_of(number))
            for number in range(len(self.prompts))
        )
        usage = Usage(tokens, completion, tokens + completion, PromptTokensDetails(cached))
        factories = (prompt.choice_factory for prompt in self.prompts)
        thinks = any(factory is not None and factory.thinks for factory in factories)
        predicts = any(prompt.prediction is not None for prompt in self.prompts)
        drafts = predicts or self.model.info.speculates
        if thinks or drafts:
            details = CompletionTokensDetails(sum(each.reasoning_tokens for each in self.choices))
            if drafts:
                details.accepted_prediction_tokens = sum(each.accepted for each in self.choices)
                details.rejected_prediction_tokens = sum(each.rejected for each in self.choices)
            usage.completion_tokens_details = details
        return usage

    def close(self) -> None:
        """Cancels the choices that are still running in the engine."""
        for pump in self._pumps:
            if not pump.cancel() and not pump.cancelled():
                pump.exception()  # retrieved, or asyncio would log it
        if self.accepted and self._streams:
            self._account.end(len(self.choices))
        for number, stream in enumerate(self._streams):
            stream.close()
            longest = max(choice.tokens for choice in self._choices_of(number))
            self._recorder.record_prompt(self.n, longest, self.model.engine_name)
        self._streams = []

    def _choices_of(self, prompt: int) -> list[Choice]:
        return self.choices[prompt * self.n : (prompt + 1) * self.n]

    async def _arrivals(self) -> AsyncGenerator[list[_Arrived], None]:
        """Yields the engine's outputs, all outputs of one step together."""
        if len(self.prompts) == 1:
            async for outputs in self._streams[0]:
                yield [_Arrived(0, outputs)]
            return
        # All outputs of a step arrive together: the pumps collect them before this task wakes.
        inbox = self._inbox
        wake = asyncio.Event()

        async def pump(prompt: int, stream: TokenStream) -> None:
            try:
                async for outputs in stream:
                    inbox.append(_Arrived(prompt, outputs))
                    wake.set()
            finally:
                wake.set()

        def begin(prompt: int) -> None:
            self._pumps.append(asyncio.create_task(pump(prompt, self._streams[prompt])))

        for prompt in range(len(self._streams)):
            begin(prompt)
        while True:
            await wake.wait()
            wake.clear()
            # One turn of the event loop lets the other pumps add their outputs of this step.
            await asyncio.sleep(0)
            if inbox:
                batch, inbox[:] = inbox[:], []
                yield batch
            for task in [pump for pump in self._pumps if pump.done()]:
                task.result()
                self._pumps.remove(task)
                if len(self._streams) < len(self.prompts):
                    self._submit_next()
                    begin(len(self._streams) - 1)
            if not self._pumps and not inbox:
                return
