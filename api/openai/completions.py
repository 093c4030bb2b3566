"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from chairlift.api.generate.answer import AnsweredChoice, answer
from chairlift.api.generate.body import read
from chairlift.api.generate.continuation import prepare_continuation
from chairlift.api.generate.generation import Generation
from chairlift.api.openai.echo import Echo
from chairlift.api.openai.formatter import ChunkFormatter
from chairlift.api.schemas.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
)
from chairlift.api.schemas.schemas import CompletionRequest
from chairlift.api.text.choice import OutputDelta, TextChoice
from chairlift.api.text.logprobs import Scored, completion_logprobs, joined

# OpenAI's default for completions; chat's is the remaining context.
DEFAULT_MAX_TOKENS = 16


async def completions(http: web.Request) -> web.StreamResponse:
    """Continues one or several prompts."""
    request = await read(http, CompletionRequest)
    generation = await prepare_continuation(http, request, "cmpl-", DEFAULT_MAX_TOKENS)
    echoes = []
    if request.echo:
        vocabulary = generation.model.vocabulary
        pairs = zip(request.prompt, generation.prompts, strict=True)
        echoes = [await Echo.from_prompt(one, p.tokens, vocabulary) for one, p in pairs]
    formatter = _CompletionFormatter(generation, request, echoes)
    return await answer(http, request, generation, formatter)


class _CompletionFormatter(ChunkFormatter[CompletionChoice]):
    """The ReplyFormatter of completions. ``echoes`` are the prompts to repeat, or empty."""

    def __init__(
        self, generation: Generation, request: CompletionRequest, echoes: list[Echo]
    ) -> None:
        super().__init__(generation, request)
        self._top_logprobs = request.logprobs
        self._echoes = echoes
        # Log-probabilities by prompt, computed once for its n choices.
        self._echoed: dict[int, CompletionLogprobs] = {}
        self._n = request.n
        self._vocabulary = generation.model.vocabulary

    def opening(self, index: int) -> Sequence[msgspec.Struct]:
        if not self._echoes:
            return []
        choice = CompletionChoice(index, self._echo(index), self._prompt_logprobs(index))
        return [self._chunk([choice])]

    def chunks(self, delta: OutputDelta) -> Sequence[msgspec.Struct]:
        index, text, scored, finish = delta[:4]
        chunks = []
        if text or scored:
            chunks.append(CompletionChoice(index, text, self._logprobs(index, scored or [])))
        if finish is not None:
            chunks.append(CompletionChoice(index, "", finish_reason=finish))
        return [self._chunk([chunk]) for chunk in chunks]

    def full_reply(self, choices: Sequence[AnsweredChoice], usage: Usage) -> msgspec.Struct:
        reply = self._chunk(
            [
                CompletionChoice(
                    choice.index,
                    self._echo(choice.index) + choice.text,
                    self._all_logprobs(choice),
                    choice.finish,
                )
                for choice in choices
            ]
        )
        reply.usage = usage
        return reply

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n].text if self._echoes else ""

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        generation = self._generation
        return Completion(
            generation.id,
            generation.created,
            generation.model.name,
            generation.model.fingerprint,
            choices,
            self._chunk_usage(),
        )

    def _logprobs(self, index: int, scored: list[Scored]) -> CompletionLogprobs | None:
        if self._top_logprobs is None:
            return None
        before = len(self._echo(index))
        return completion_logprobs(scored, self._vocabulary, self._top_logprobs, before)

    def _prompt_logprobs(self, index: int) -> CompletionLogprobs | None:
        choice = self._generation.choices[index]
        if not isinstance(choice, TextChoice) or choice.prompt_logprobs is None:
            return None
        prompt = index // self._n
        if prompt not in self._echoed:
            self._echoed[prompt] = self._echoes[prompt].logprobs(
                choice.prompt_logprobs, self._vocabulary, self._top_logprobs or 0
            )
        return self._echoed[prompt]

    def _all_logprobs(self, choice: AnsweredChoice) -> CompletionLogprobs | None:
        output = self._logprobs(choice.index, choice.scored)
        prompt = self._prompt_logprobs(choice.index)
        return output if output is None or prompt is None else joined(prompt, output)
