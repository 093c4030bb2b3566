"""One HTTP request in the engine: its prompts are submitted, and its choices' pieces come back."""

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
from chairlift.api.schemas.schemas import Generate
from chairlift.api.service import ServedModel
from chairlift.api.text.choice import Choice, Piece, TextChoice, VectorChoice
from chairlift.api.text.stops import StopMatcher, Stops
from chairlift.api.text.stream import Detokenizer, TextStream
from chairlift.engine.client.interface import TokenStream
from chairlift.engine.messages import SamplingParams, Submit, TokenOutput
from chairlift.metrics.recorder import Recorder
from chairlift.scheduler.sequence import Pooling


class ReplyReader(Protocol):
    """Reads replies that are more than text: thoughts and calls, as a chat's may be."""

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
    """A prompt as token ids, with its sampling parameters.

    ``reading`` is how its replies are read; None: they are text and nothing else.
    ``prompt_logprobs`` and ``pooling`` are what is wanted of itself, see ``Submit``.
    """

    tokens: list[int]
    params: SamplingParams
    reading: ReplyReader | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of itself are wanted."""
        return self.prompt_logprobs is not None


class _Arrived(NamedTuple):
    """Outputs of one of the prompts."""

    prompt: int
    outputs: list[TokenOutput]


class Generation:
    """Runs all prompts of ``request``, each with its n choices; ``close`` must follow always.

    Choice i of prompt p has the index p * n + i. All of them are of the class ``priority``, and
    what they use is counted in ``account``. The engine is given no more prompts than ``at_once``
    at a time, None: all; it has ``accepted`` all of the first, or none. ``times`` are those of the
    prompts that it was given.
    """

    def __init__(
        self,
        model: ServedModel,
        recorder: Recorder,
        request: Generate,
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

    def _choice(self, request: Generate, index: int) -> Choice:
        prompt = self.prompts[index // self.n]
        if prompt.pooling is not None:
            return VectorChoice(index)
        vocabulary = self.model.vocabulary
        matcher = StopMatcher(self._stops, request.include_stop_str_in_output)
        with_logprobs = prompt.params.logprobs is not None
        if prompt.reading is not None:
            return prompt.reading.new_choice(index, vocabulary.detokenizer, matcher, with_logprobs)
        hidden = vocabulary.hidden_ids if request.skip_special_tokens else frozenset()
        text = TextStream(vocabulary.detokenizer(), hidden, matcher)
        return TextChoice(index, text, with_logprobs, echoed=prompt.is_scored)

    def submit(self, arrival: float) -> None:
        """Hands the prompts to the engine; ``arrival`` is in seconds of ``time.monotonic()``.

        Raises:
            RateLimited: the account does not allow it now.
            QueueFull, EngineDead: one of them is not accepted; ``close`` takes the others back.
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
        )
        self._streams.append(self.model.submit(submit))
        self.times.append(PromptTimes(self._arrival))

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What is new of the choices, until all have finished: what a step added to each, in order.

        Raises:
            EngineDead: the engine ended first.
            GenerationFailed: the engine gave a choice up.
            QueueFull: there is no room for a prompt that was not among the first.
        """
        async with aclosing(self._arrivals()) as arrivals:
            async for arrived in arrivals:
                now = time.monotonic()
                pieces: list[Piece] = []
                for prompt, new in arrived:
                    for output in new:
                        pieces += self._take(prompt, output, now)
                self.detokenizing.add(now)
                if pieces:
                    yield pieces
                if all(choice.finish for choice in self.choices):
                    return
        raise GenerationFailed("the engine ended this request")

    def _take(self, prompt: int, output: TokenOutput, now: float) -> Sequence[Piece]:
        """The pieces that an output makes."""
        self.times[prompt].take(output, now)
        choice = self.choices[prompt * self.n + output.index]
        if choice.finish is not None:
            return ()  # it was on its way when a stop string was found
        before = choice.tokens
        pieces = choice.take(output)
        self._account.spend(choice.tokens - before)
        if choice.finish is not None and output.finish is None:
            self._streams[prompt].stop(output.index)
        return pieces

    @property
    def waiting(self) -> int:
        """Outputs that have come and were not asked for yet."""
        return sum(stream.waiting for stream in self._streams) + len(self._inbox)

    @property
    def echoed_tokens(self) -> int:
        """Tokens of the prompts that are told with their log-probabilities."""
        return sum(len(prompt.tokens) for prompt in self.prompts if prompt.is_scored)

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def usage(self) -> Usage:
        """Tokens so far. A prompt is counted once, and so is its cached part, whatever its n."""
        tokens = self._prompt_tokens
        completion = sum(choice.tokens for choice in self.choices)
        cached = sum(
            max(choice.cached_tokens for choice in self._choices_of(number))
            for number in range(len(self.prompts))
        )
        usage = Usage(tokens, completion, tokens + completion, PromptTokensDetails(cached))
        if any(prompt.reading is not None and prompt.reading.thinks for prompt in self.prompts):
            thought = sum(choice.reasoning_tokens for choice in self.choices)
            usage.completion_tokens_details = CompletionTokensDetails(thought)
        return usage

    def close(self) -> None:
        """Ends in the engine whatever of it still runs."""
        for pump in self._pumps:
            if not pump.cancel() and not pump.cancelled():
                pump.exception()  # seen; asyncio would log it otherwise
        if self.accepted and self._streams:
            self._account.end(len(self.choices))
        for number, stream in enumerate(self._streams):
            stream.close()
            longest = max(choice.tokens for choice in self._choices_of(number))
            self._recorder.record_prompt(self.n, longest)
        self._streams = []

    def _choices_of(self, prompt: int) -> list[Choice]:
        return self.choices[prompt * self.n : (prompt + 1) * self.n]

    async def _arrivals(self) -> AsyncGenerator[list[_Arrived], None]:
        """The engine's outputs, all of one step together."""
        if len(self.prompts) == 1:
            async for outputs in self._streams[0]:
                yield [_Arrived(0, outputs)]
            return
        # A step's outputs are ready together: the pumps gather them before this task wakes.
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
            # One turn of the loop: the other pumps' outputs of this step, and ends, come in.
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
