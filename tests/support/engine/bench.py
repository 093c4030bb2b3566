"""An engine in the test's process, stepped by the test."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.engine.core import build_core

from chairlift.cache.pages import page
from chairlift.cache.pages.kernels import PageKernels
from chairlift.cache.quantized import Storage
from chairlift.cache.saved.nodes import fingerprint
from chairlift.cache.store.store import PrefixStore
from chairlift.cache.swap.files import SwapFiles
from chairlift.cache.swap.swap import Swap
from chairlift.engine.device.dispatch import Dispatcher
from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.messages import (
    FinishedChoice,
    SamplingParams,
    StepStats,
    Submit,
    TokenOutput,
)
from chairlift.engine.model.trials.probe import probe
from chairlift.engine.model.vision.encoder import IMAGE_BYTES
from chairlift.engine.speculation.proposal import Proposer, proposers
from chairlift.scheduler.limits import Limits


class Bench:
    """An engine that the test steps.

    Attributes:
        outputs: token outputs by request id and choice.
        stats: of each step.
    """

    def __init__(
        self,
        model: Any,
        *,
        rows: int = 8,
        tokens: int = 40,
        kv: int | None = None,
        prefix: int = 0,
        eager: bool = False,
        directory: Path | None = None,
        swap: int = 0,
        swap_files: SwapFiles | None = None,
        offloads: bool = False,
        quantization: Storage | None = None,
        bands: int = 1,
        ahead: int = 0,
        max_scored: int = 512,
        compiler: Compiler | None = None,
        draft: int = 0,
        propose: Callable[[Submit], list[Proposer]] = proposers,
        kernels: PageKernels | None = None,
        prefix_drafts: bool = False,
        draft_model: Any = None,
        image_bytes: int = IMAGE_BYTES,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        geometry, vocabulary, layers = probe(model, "test", quantization)
        if kv is None:
            kv = 1 << 30 if kernels is None else 1 << 22  # all pages are cleared at once
        checkpoint = None if geometry.pads else page.PAGE_TOKENS
        limits = Limits(
            *(rows, tokens, kv, geometry, checkpoint),
            lookahead_columns=ahead,
            bands=bands,
            max_scored=max_scored,
            draft_tokens=draft,
            prefill_slack=0.0,  # the order does not depend on measured times
        )
        kinds = [layer.kind for layer in layers]
        store = (
            PrefixStore(directory, 1 << 26, fingerprint("test"), kinds, layers)
            if directory
            else None
        )
        self.core = build_core(
            *(model, vocabulary, limits, eager, prefix, quantization, store),
            Swap(kinds, swap, swap_files, offloads, lambda sequence: sequence.rank),
            compiler=compiler,
            propose=propose,
            kernels=kernels,
            prefix_drafts=prefix_drafts,
            draft_model=draft_model,
            image_bytes=image_bytes,
            dispatcher=dispatcher,
        )
        self.quantization = quantization
        self.outputs: dict[tuple[str, int], list[TokenOutput]] = {}
        self.stats: list[StepStats] = []

    def submit(
        self,
        name: str,
        prompt: list[int],
        count: int = 8,
        n: int = 1,
        salt: str = "",
        reading: Mapping[str, Any] = {},
        **params: Any,
    ) -> None:
        sampling = SamplingParams(**({"max_tokens": count, "seed": 1, "temperature": 0.0} | params))
        self.core.submit(Submit(name, prompt, sampling, n, cache_salt=salt, **reading))

    def step(self) -> None:
        output = self.core.step()
        self.core.scheduler.check_integrity()
        for band in self.core.batch.bands:
            band.check_integrity()
        self.stats.append(output.stats)
        for token in output.outputs:
            self.outputs.setdefault((token.request_id, token.index), []).append(token)

    def drain(self) -> None:
        while not self.core.idle or self.core.scheduler.waiting:
            if self.core.idle:
                time.sleep(0.001)  # a request waits for the disk
            else:
                self.step()

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [t for output in self.outputs[name, index] for t in output.token_ids]

    @property
    def finished(self) -> list[FinishedChoice]:
        return [choice for stats in self.stats for choice in stats.finished]


def serve_random(bench: Bench, requests: int, seed: int) -> dict[str, list[int]]:
    """The tokens of random requests that come one by one; some of them share a prefix."""
    random_ = random.Random(seed)
    shared = [random_.randrange(3, 60) for _ in range(70)]
    for number in range(requests):
        own = [random_.randrange(3, 60) for _ in range(random_.randrange(1, 90))]
        prompt = shared[: random_.choice([0, 30, 70])] + own
        bench.submit(str(number), prompt, count=random_.randrange(1, 24), seed=number)
        for _ in range(random_.randrange(4)):
            bench.step()
    bench.drain()
    return {str(number): bench.tokens(str(number)) for number in range(requests)}
