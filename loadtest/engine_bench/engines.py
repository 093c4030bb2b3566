"""The two engines that are measured, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mlx_lm.generate import BatchGenerator

from chairlift.engine.config import EngineConfig
from chairlift.engine.core.acceleration import Acceleration
from chairlift.engine.core.background import Background
from chairlift.engine.core.checks import MAX_REAL
from chairlift.engine.core.core import EngineCore
from chairlift.engine.core.prepared_model import prepare_model
from chairlift.engine.core.start import kv_storage
from chairlift.engine.core.warm import warm_model
from chairlift.engine.device.dispatch import make_dispatcher
from chairlift.engine.device.limits import build_limits
from chairlift.engine.device.memory import configure_mlx
from chairlift.engine.device.profile import current
from chairlift.engine.lora.adapters import AdapterLimits
from chairlift.engine.messages import SamplingParams, Submit
from chairlift.engine.model.trials.probe import Probed
from chairlift.engine.parallel.ranks import Ranks
from chairlift.engine.speculation.proposal import Proposer, proposers


class BenchRequest(NamedTuple):
    """A prompt's token ids, and the number of tokens to generate.

    Attributes:
        repeated: the only token of the output; None lets the model choose.
    """

    prompt: list[int]
    output: int
    repeated: int | None = None


class StepResult(NamedTuple):
    """The result of one step: tokens generated, requests that ended and that got tokens."""

    tokens: int
    ended: int
    rows: int


class Drafted(NamedTuple):
    """Proposed tokens of all steps, and how many of them were right."""

    proposed: int
    accepted: int


class Engine(Protocol):
    """An engine that generates one step at a time."""

    def add(self, requests: list[BenchRequest]) -> None:
        """Queues requests.

        Raises:
            ValueError: one can never fit.
        """
        ...

    def step(self) -> StepResult:
        """Computes one step. A step of prefill alone generates no tokens."""
        ...

    @property
    def reserved(self) -> int:
        """Bytes of KV that are allocated now."""
        ...

    @property
    def used(self) -> int:
        """Bytes of KV of the tokens that are cached now; 0 if unknown."""
        ...


class MeasuredModel(NamedTuple):
    """A model with random weights, or this rank's part of it, and what its engines need.

    Attributes:
        config: the settings of its engines, with a ``kv_memory``, beside their number of rows.
    """

    model: Any
    probed: Probed
    acceleration: Acceleration
    config: EngineConfig
    ranks: Ranks

    def make_core(
        self,
        rows: int,
        paced: bool,
        *background: Background,
        adapters: Sequence[Path] = (),
        propose: Callable[[Submit], list[Proposer]] = proposers,
    ) -> EngineCore:
        """An engine without a prefix cache; ``paced`` limits the time of its steps.

        It loads the ``adapters`` from their folders, with the folders' names as keys. ``propose``
        makes the proposers of each request.
        """
        config, ranks = replace(self.config, max_rows=rows), self.ranks
        dispatcher = make_dispatcher(ranks.size)
        geometry, vocabulary, _ = self.probed
        assert config.kv_memory is not None
        limits = build_limits(
            config, current(), geometry, vocabulary, config.kv_memory, prefix_bytes=0
        )
        if not paced:
            limits = replace(limits, step_seconds=math.inf)
        prepared = prepare_model(
            *(self.model, vocabulary, limits.chunk_multiple, self.acceleration.eager),
            storage=kv_storage(config, half=False),
            kernels=self.acceleration.pages,
            ranks=ranks,
            adapter_limits=AdapterLimits(max_loras=len(adapters)),
        )
        for folder in adapters:
            prepared.adapters.load(folder.name, folder)
        buffers = configure_mlx(current())
        warm_model(prepared, limits, kernels=current().compiles_kernels)
        core = EngineCore(
            *(prepared, limits),
            background=background,
            journal=ranks.journal,
            propose=propose,
            buffers=buffers,
            dispatcher=dispatcher,
        )
        core.compile()
        return core


class Ours:
    """Chairlift's engine. Successive requests have successive ``adapters``.

    Attributes:
        drafted: the drafts of all steps so far.
    """

    def __init__(
        self,
        model: MeasuredModel,
        rows: int,
        paced: bool,
        adapters: Sequence[Path] = (),
        propose: Callable[[Submit], list[Proposer]] = proposers,
    ) -> None:
        self._core = model.make_core(rows, paced, adapters=adapters, propose=propose)
        self._adapters = [folder.name for folder in adapters] or [""]
        self._added = 0
        self.drafted = Drafted(0, 0)
        self.reserved = self.used = 0

    def add(self, requests: list[BenchRequest]) -> None:
        longest = self._core.limits.max_context
        for request in requests:
            tokens = len(request.prompt) + request.output
            if tokens > longest:
                raise ValueError(f"a request of {tokens} tokens is too long: {longest} fit")
            bias = {} if request.repeated is None else {request.repeated: MAX_REAL}
            params = SamplingParams(request.output, seed=0, temperature=0.0, logit_bias=bias)
            adapter = self._adapters[self._added % len(self._adapters)]
            submit = Submit(str(self._added), request.prompt, params, adapter=adapter)
            self._core.submit(submit)
            self._added += 1

    def step(self) -> StepResult:
        output = self._core.step()
        self.reserved = output.stats.kv_reserved_bytes
        self.used = output.stats.kv_used_bytes
        proposed, accepted = self.drafted
        self.drafted = Drafted(
            proposed + output.stats.draft_tokens, accepted + sum(output.stats.accepted_tokens)
        )
        ended = sum(token.finish is not None for token in output.outputs)
        tokens = [len(token.token_ids) for token in output.outputs]
        return StepResult(sum(tokens), ended, sum(count > 0 for count in tokens))


class Peer:
    """mlx-lm's generator, with prompts in batches of 8."""

    used = 0

    def __init__(self, model: Any, rows: int, paced: bool) -> None:
        self._generator = BatchGenerator(model, completion_batch_size=rows, prefill_batch_size=8)

    def add(self, requests: list[BenchRequest]) -> None:
        prompts = [request.prompt for request in requests]
        self._generator.insert(prompts, max_tokens=[request.output for request in requests])

    def step(self) -> StepResult:
        _, generated = self._generator.next()
        ended = sum(token.finish_reason is not None for token in generated)
        return StepResult(len(generated), ended, len(generated))

    @property
    def reserved(self) -> int:
        return int(self._generator.prompt_cache_nbytes)
