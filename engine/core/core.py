"""The engine core: plans a step, launches it, and reads the previous step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

from chairlift.cache.pages.batch import PagedBatch
from chairlift.cache.store.store import PrefixStore
from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.background import Background, GrammarWork, ImageWork, SwapWork
from chairlift.engine.core.checks import check_submit, check_uncut
from chairlift.engine.core.decode import DecodeBatch
from chairlift.engine.core.outputs import Outputs
from chairlift.engine.core.pipeline import LaunchOrder, Pipeline
from chairlift.engine.core.prefill import PrefillBatch
from chairlift.engine.core.prefix_cache import PrefixCache
from chairlift.engine.core.prepared_model import PreparedModel
from chairlift.engine.core.prompt_outputs import PromptOutputs
from chairlift.engine.core.requests import Requests
from chairlift.engine.core.stats import PhaseTimer, StepRecorder
from chairlift.engine.device.buffers import BufferCache
from chairlift.engine.device.dispatch import CallerDispatch, Dispatcher
from chairlift.engine.grammar.compiler import Compiler
from chairlift.engine.grammar.constraints import Constraints
from chairlift.engine.grammar.pending import Grammars
from chairlift.engine.logs.redacted_traceback import redacted_traceback
from chairlift.engine.messages import (
    Abort,
    AdapterFailed,
    AdapterLoaded,
    LoadAdapter,
    StepOutput,
    Submit,
    TokenOutput,
)
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.vision.encoder import IDLE_SECONDS, IMAGE_BYTES, ImageEncoder
from chairlift.engine.parallel.journal import Journal, NoJournal
from chairlift.engine.sampling.sampler import SamplerRow
from chairlift.engine.speculation.draft_model import DraftModel
from chairlift.engine.speculation.proposal import PrefixProposer, Proposer, proposers
from chairlift.engine.speculation.speculator import Speculator
from chairlift.scheduler.cost import Work
from chairlift.scheduler.drafts import Chosen
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.plan import Plan
from chairlift.scheduler.scheduler import Scheduler
from chairlift.scheduler.sequence import Sequence

log = logging.getLogger(__name__)

# Encoding of images waits for at most this many consecutive steps with prompts.
MAX_ENCODER_WAITS = 8


class EngineCore:
    """Serves requests with one model, in one batch. Not thread-safe.

    Args:
        model: how to call the model, and its caches.
        limits: the scheduler's limits; see ``PreparedModel.adapt_limits``.
        prefix_bytes: memory for the prefix cache; 0 turns it off.
        store: keeps prefixes on disk; None keeps them only in memory.
        swap: keeps the states of preempted rows; with None they are computed again.
        compiler: compiles grammars; with None, no request may have one.
        background: further work that requests may wait for.
        journal: takes the decisions that another rank needs to do the same.
        propose: makes the proposers of a request.
        prefix_drafts: continuations in the prefix cache are proposed first.
        draft_model: proposes where these have nothing; None: no draft model.
        buffers: MLX's cache of buffers; None: it has no limit.
        dispatcher: dispatches steps over pages; None: this thread does.
        image_bytes: memory for the embeddings of images.
    """

    def __init__(
        self,
        model: PreparedModel,
        limits: Limits,
        prefix_bytes: int = 0,
        store: PrefixStore | None = None,
        swap: Swap[Sequence] | None = None,
        compiler: Compiler | None = None,
        background: Seq[Background] = (),
        journal: Journal | None = None,
        propose: Callable[[Submit], list[Proposer]] = proposers,
        prefix_drafts: bool = False,
        draft_model: PreparedModel | None = None,
        buffers: BufferCache | None = None,
        dispatcher: Dispatcher | None = None,
        image_bytes: int = IMAGE_BYTES,
    ) -> None:
        self._buffers = buffers
        self.limits = limits = model.adapt_limits(limits)
        self._journal: Journal = NoJournal() if journal is None else journal
        # Called with the sequences about to run, before any work is dispatched.
        self.on_compute: Callable[[list[Sequence]], None] = lambda sequences: None
        self.adapters = model.adapters
        self.requests = Requests(model.vocabulary, model.adapters)
        prompts_only = model.vision is not None and model.vision.windows_replies
        self.prefixes = PrefixCache(model.kinds, prefix_bytes, store, prompts_only)
        make_cache = model.caches(limits, prefix_bytes, self._reclaim)
        self.swap: Swap[Sequence] = Swap(model.kinds, 0) if swap is None else swap
        self.grammars = Grammars(compiler)
        self.images = ImageEncoder(model.vision, image_bytes)
        # The number of consecutive steps with prompts for which the encoder has waited.
        self._encoder_waits = 0
        self._background: tuple[Background, ...] = (
            self.prefixes,
            SwapWork(self.swap),
            GrammarWork(self.grammars),
            ImageWork(self.images),
            *background,
        )
        constraints = Constraints(
            model.vocabulary,
            lambda s: self.requests.request_for(s).constraint(self.grammars.matcher(s)),
        )
        cached = self.prefixes.cached if prefix_bytes else None
        self.scheduler = Scheduler(limits, cached, self._is_awaited, self.swap.covers)
        self.prefill = PrefillBatch(
            *(make_cache, self.prefixes, self.swap, limits, model.adapters, self.images)
        )
        self.prompt_outputs = PromptOutputs()
        self.batch = DecodeBatch(
            [make_cache() for _ in range(limits.bands)],
            model.vocabulary,
            self._sampler_row,
            model.agree,
        )
        self._recorder = StepRecorder(
            *(limits, self.scheduler, self.batch, self.prefill),
            *(self.prefixes, self.swap, self.grammars, self.images),
        )
        self.pipeline = Pipeline(
            *(model, self.batch, self.prefill, self.prompt_outputs, self.prefixes, self.swap),
            *(constraints, self._recorder, self._learn, self.images),
            dispatcher or CallerDispatch(),
        )
        model.forward.wait_dispatched = self.pipeline.wait_dispatched
        known = self.prefixes if prefix_drafts and self.prefixes.active else None
        self.speculator = Speculator(
            lambda request: [*([PrefixProposer(known)] if known else []), *propose(request)],
            self.pipeline.order is LaunchOrder.EAGER,
            limits.draft_tokens,
            constraints,
            lambda sequence: self.requests.request_for(sequence).submit,
            None if draft_model is None else self._drafter(draft_model),
        )
        self.outputs = Outputs(
            *(self.requests, self.scheduler, constraints, self.grammars, self._recorder),
            self._background,
            self._journal.ended,
        )

    def _drafter(self, model: PreparedModel) -> DraftModel:
        limits = self.limits
        # The size of a token includes that of one in the draft model's cache.
        max_tokens = limits.kv_bytes // max(1, limits.geometry.bytes_per_token)
        return DraftModel(
            *(model.forward, model.make_cache),
            min(self.requests.vocabulary, model.vocabulary),
            lambda sequence: self._sampler_row(sequence).params,
            *(max(max_tokens, limits.max_context), model.max_context),
        )

    def _sampler_row(self, sequence: Sequence) -> SamplerRow:
        return self.requests.request_for(sequence).sampler_row(sequence)

    @property
    def idle(self) -> bool:
        """Whether a step would neither compute nor report anything, nor remove a row.

        Requests may still wait for background work, which calls ``wake`` when it has finished.
        """
        if not self.scheduler.idle or self.pipeline.running.computed or self.batch.occupied:
            return False
        unreported = self._recorder.current.finished or self.outputs.pending
        return not (unreported or any(work.due for work in self._background))

    @property
    def cached_bytes(self) -> int:
        """Bytes of all cached prefixes and swapped states in memory."""
        return self.prefixes.nbytes + self.swap.nbytes

    def submit(self, request: Submit) -> None:
        """Queues a request. If that fails, only this request ends with an error."""
        self.pipeline.wait_dispatched()
        try:
            self.grammars.begin(request)
            if request.images:
                check_submit(request, self.requests.vocabulary)
            self.images.begin(request.request_id, request.prompt, request.images)
            uncut = check_uncut(request, self.images.images_of(request.request_id), self.limits)
            sequences = self.requests.add(request, uncut)
        except Exception as error:  # of any type: the cause is this request
            self.grammars.drop(request.request_id)
            self.images.drop(request.request_id)
            self.outputs.refuse(request, error)
            return
        # NOTE: fetch only once, because resumed choices share their prefix.
        self.prefixes.fetch(sequences[0])
        if request.images:
            known = 0 if sequences[0].bypasses_prefix_cache else self.prefixes.cached(sequences[0])
            self.images.await_images(*(request.request_id, request.prompt, request.images, known))
        self._journal.submitted(request, self._is_awaited(sequences[0]))
        for sequence in sequences:
            self.scheduler.add(sequence)

    def compile(self) -> None:
        """Compiles steps in advance, so that none is slower than the others."""
        (band, *_), forward = self.batch.bands, self.pipeline.forward
        if isinstance(forward, PagedForward) and isinstance(band, PagedBatch):
            limits = self.limits
            forward.compile(
                *(band.memory, limits.max_rows, limits.draft_tokens, limits.max_step_tokens)
            )

    def on_due(self, wake: Callable[[], None]) -> None:
        """Registers ``wake``, which other threads call when an idle engine may have work again."""
        for work in self._background:
            work.on_due(wake)

    def close(self, timeout: float) -> None:
        """Ends background work and saves what outlives the process, within ``timeout`` seconds."""
        self.pipeline.wait_dispatched()
        # Prefixes come last, because saving them may take all of the time.
        for work in reversed(self._background):
            work.close(timeout)

    def abort(self, abort: Abort) -> None:
        """Ends one or all choices of a request, if it exists. Rows leave with the next step."""
        for sequence in self.scheduler.sequences_of(abort.request_id):
            if abort.index is None or not sequence.forked or sequence.index == abort.index:
                self.outputs.finish(sequence, abort.reason)

    def withdraw(self, request_id: str) -> None:
        """Removes a request without reporting it. Ignores unknown ids."""
        for sequence in self.scheduler.sequences_of(request_id):
            self.outputs.remove(sequence)

    def load_adapter(self, message: LoadAdapter) -> AdapterLoaded | AdapterFailed:
        """Loads a LoRA adapter. If that fails, nothing has changed."""
        self.pipeline.complete()
        try:
            files = self.adapters.load(message.key, Path(message.path), message.digest)
        except Exception as error:  # of any type: the cause is this adapter
            log.debug("an adapter cannot be loaded: %s", redacted_traceback(error))
            return AdapterFailed(message.key, " ".join(str(error).split()))
        return AdapterLoaded(message.key, files.digest, files.rank)

    def unload_adapter(self, key: str) -> None:
        """Removes a LoRA adapter, unless a request still uses it."""
        if self.requests.uses(key):
            log.error("the adapter %s is in use and stays loaded", key)
        else:
            self.pipeline.complete()
            self.adapters.unload(key)

    def step(self) -> StepOutput:
        """Plans and launches a step, if ``Pipeline`` does not read first; returns read tokens."""
        timer = PhaseTimer(self._recorder.current.phases)
        if self.pipeline.reads_first:
            return StepOutput(self._read_running(timer), self._recorder.finish(Plan(), timer.total))
        prompts = self.images.has_news or bool(self.scheduler.prefilling)
        self._collect()
        spent = self._encode(timer, prompts) if self.images.has_work else 0.0
        outputs, drafts = self._read_ahead(timer)
        plan = self.scheduler.plan(self.batch.capacities, drafts, spent)
        self.on_compute([*self.pipeline.running.computed, *plan.decode, *plan.chunks])
        self._journal.publish(plan, self.cached_bytes)
        timer.end("schedule")
        self.pipeline.launch(plan, timer)
        self.scheduler.commit(plan)
        outputs += self.outputs.read(self.pipeline.finish(timer))
        self.speculator.observe()
        self.speculator.probe(self.scheduler.running, self.scheduler.choose_drafts)
        if plan.preempted:
            self.pipeline.wait_dispatched()
        self.swap.move_to_host()
        if self._buffers is not None:
            self._buffers.trim()
        timer.end("output")
        return StepOutput(outputs, self._recorder.finish(plan, timer.total))

    def _encode(self, timer: PhaseTimer, prompts: bool) -> float:
        """Encodes waiting images for as long as a step beside the running rows may take.

        Args:
            prompts: prompts are being computed, or are about to be. They come first, for some
                steps. Then both share a step's time.

        Returns:
            The seconds that it took.
        """
        if prompts and self._encoder_waits < MAX_ENCODER_WAITS:
            self._encoder_waits += 1
            return 0.0
        self._encoder_waits = 0
        seconds = IDLE_SECONDS
        if self.scheduler.running:
            seconds = min(self.limits.step_seconds, IDLE_SECONDS) / (2 if prompts else 1)
        return self.pipeline.run_between(lambda: self.images.encode(seconds), timer)

    def _read_ahead(self, timer: PhaseTimer) -> tuple[list[TokenOutput], Chosen]:
        """Reads the running step first, if there is one and the next may have drafts.

        Returns:
            Its outputs, and the chosen drafts.
        """
        scheduler, running = self.scheduler, self.pipeline.running
        if not self.speculator.due(len(scheduler.running), bool(running.drafts)):
            return [], {}
        outputs = self._read_running(timer) if running.computed else []
        return outputs, self.speculator.drafts(scheduler.running, scheduler.choose_drafts)

    def _read_running(self, timer: PhaseTimer) -> list[TokenOutput]:
        """Reads the running step before the next one is planned."""
        self._journal.read()
        return self.outputs.read(self.pipeline.finish_running(timer))

    def _collect(self) -> None:
        """Passes the results of finished background work to the scheduler."""
        if any(work.due for work in self._background):
            self.pipeline.wait_dispatched()
        for work in self._background:
            blocked, ready, failed = work.collect()
            self._journal.ready(ready)
            for sequence in blocked:
                self.scheduler.waiting.block(sequence)
            for request_id, error in failed.items():
                for sequence in self.scheduler.sequences_of(request_id):
                    self.outputs.fail(sequence, error)

    def _reclaim(self) -> bool:
        """Drops a cached prefix, which may go to disk; returns whether there was one."""
        self.pipeline.wait_dispatched()
        return self.prefixes.drop_one()

    def _learn(self, work: Work, seconds: float) -> None:
        self.scheduler.learn(work, seconds)
        self._journal.learned(work, seconds)

    def _is_awaited(self, sequence: Sequence) -> bool:
        """Whether a sequence cannot begin before some background work has finished."""
        return any(work.is_awaited(sequence) for work in self._background)
