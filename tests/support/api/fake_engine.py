"""A scripted engine and a tiny tokenizer, for tests of the API that need no model."""

from __future__ import annotations

import asyncio
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_directory
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from chairlift.cache.capacity import KVGeometry
from chairlift.engine.client.adapters import AdapterTable
from chairlift.engine.errors import ChairliftError, EngineDead
from chairlift.engine.messages import (
    FinishedChoice,
    FinishReason,
    ModelInfo,
    OnProgress,
    PrefillTimes,
    PromptLogprobs,
    StepStats,
    Submit,
    TokenLogprobs,
    TokenOutput,
    silent,
)
from chairlift.engine.model.text.detokenizer import byte_detokenizer
from chairlift.scheduler.limits import Limits

END = "<|im_end|>"
# The pooled hidden state of every text.
VECTOR = array("f", [3.0, 0.0, 4.0, 0.0])
_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.name == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    chat_template: str | None = _TEMPLATE, special: Sequence[str] = (), plain: Sequence[str] = ()
) -> TokenizerWrapper:
    """A tokenizer with one token per byte and two special tokens, loaded by mlx-lm from a file.

    Args:
        chat_template: None for a model without one.
        special: further special tokens.
        plain: further tokens that are ordinary text.
    """
    vocab = {char: index for index, char in enumerate(bytes_to_unicode().values())}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        additional_special_tokens=["<|im_start|>", *special],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(plain))
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        wrapper = load_directory(Path(directory))
    # load_tokenizer does the same.
    wrapper._detokenizer = byte_detokenizer(wrapper)
    return wrapper


@dataclass
class Scripted:
    """One choice's output.

    Attributes:
        ended_by_token: whether the last token is the end token.
        error: the message, if ``finish`` is "error".
        client_error: the error lies in the request.
        chunk: the tokens of each step.
        cached_tokens: the prompt tokens that came from the prefix cache.
        accepted: how many tokens of each step were proposed before.
        rejected: how many other tokens were proposed in each step.
    """

    tokens: list[int]
    finish: FinishReason = "stop"
    ended_by_token: bool = False
    error: str | None = None
    client_error: bool = False
    chunk: int = 1
    cached_tokens: int = 0
    accepted: int = 0
    rejected: int = 0


Script = Callable[[Submit, int], Scripted]


@dataclass
class FakeEngine:
    """An EngineClient that plays ``script``; setting ``dead`` makes it fail like a lost process.

    Attributes:
        info: the loaded model; None while it loads.
        script: the output of a request's choice.
        step_seconds, first_step_seconds: how long a step takes, and what the first takes before it.
        steps_at_once: the steps whose outputs arrive together, as for a reader that is late.
        waiting: the number of outputs that every stream reports as not yet read.
        unhealthy: why the engine accepts no requests; None if it does.
        refusal: raised for every request.
        submitted: all requests.
        stopped: request id and index of choices that the API stopped.
        closed: ids of the requests that the API closed before their end.
        adapters: the engine's LoRA adapters; None if it takes none.
    """

    info: ModelInfo | None
    script: Script
    step_seconds: float = 0.0
    first_step_seconds: float = 0.0
    steps_at_once: int = 1
    waiting: int = 0
    unhealthy: str | None = None
    degraded: str | None = None
    unfinished: int = 0
    refusal: ChairliftError | None = None
    on_step: Callable[[StepStats], None] = lambda stats: None
    submitted: list[Submit] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    adapters: AdapterTable | None = None

    @property
    def accepts(self) -> bool:
        return self.unhealthy is None

    async def start(self, on_progress: OnProgress = silent) -> ModelInfo:
        assert self.info is not None
        return self.info

    def check_room(self, choices: int, priority: int) -> None:
        if self.refusal is not None:
            raise self.refusal

    def submit(self, request: Submit) -> FakeStream:
        self.check_room(request.n, request.priority)
        self.submitted.append(request)
        return FakeStream(self, request)

    async def died(self) -> str:
        await self.dead.wait()
        return "it was killed"

    async def stop(self) -> None:
        self.dead.set()


class FakeStream:
    """Plays all choices of one request, step by step."""

    def __init__(self, engine: FakeEngine, request: Submit) -> None:
        self._engine = engine
        self._request = request
        self._scripts = {index: engine.script(request, index) for index in range(request.n)}
        self.running = set(self._scripts)

    async def __aiter__(self) -> AsyncIterator[list[TokenOutput]]:
        engine = self._engine
        position = 0
        await asyncio.sleep(engine.first_step_seconds)
        while self.running:
            await asyncio.sleep(engine.step_seconds)
            if engine.dead.is_set():
                raise EngineDead("the engine process has ended")
            arrived: list[TokenOutput] = []
            for _ in range(engine.steps_at_once):
                step = [self._output(index, position) for index in sorted(self.running)]
                self.running -= {output.index for output in step if output.finish is not None}
                arrived += step
                position += 1
            yield arrived

    @property
    def waiting(self) -> int:
        return self._engine.waiting

    def stop(self, index: int) -> None:
        self.running.discard(index)
        self._engine.stopped.append((self._request.request_id, index))

    def close(self) -> None:
        if self.running:
            self._engine.closed.append(self._request.request_id)
        self.running.clear()

    def _output(self, index: int, position: int) -> TokenOutput:
        script = self._scripts[index]
        start = position * script.chunk
        tokens = script.tokens[start : start + script.chunk]
        last = start + script.chunk >= len(script.tokens)
        logprobs = None
        if (top := self._request.params.logprobs) is not None:
            logprobs = [
                TokenLogprobs(-0.5, [(token + i, -0.5 - i) for i in range(top)]) for token in tokens
            ]
        return TokenOutput(
            self._request.request_id,
            index,
            tokens,
            logprobs,
            script.finish if last else None,
            script.ended_by_token and last,
            script.error if last else None,
            script.cached_tokens if position == 0 else 0,
            self._prefill_times() if position == 0 else None,
            self._prompt_logprobs() if position == 0 else None,
            VECTOR.tobytes() if self._request.pooling else None,
            client_error=script.client_error and last,
            accepted=script.accepted,
            rejected=script.rejected,
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of a prompt whose tokens are all the most likely ones."""
        if (top := self._request.prompt_logprobs) is None:
            return None
        following = self._request.prompt[1:]
        chosen = array("f", [-0.25] * len(following))
        ids = array("i", [token + i for token in following for i in range(top)])
        values = array("f", [-0.25 - i for _ in following for i in range(top)])
        return PromptLogprobs(chosen.tobytes(), ids.tobytes(), values.tobytes())

    def _prefill_times(self) -> PrefillTimes:
        """A quarter of the time so far was spent in the queue; the prompt took two chunks."""
        now, arrival = time.monotonic(), self._request.arrival
        quarter = (now - arrival) / 4
        tokens = len(self._request.prompt) - 1
        return PrefillTimes([(arrival + quarter, tokens), (arrival + 2 * quarter, 1)], now)


def model_info(**changes: Any) -> ModelInfo:
    """The facts of a made-up model; ``changes`` override fields."""
    facts: dict[str, Any] = {
        "architecture": "llama",
        "dtype": "float32",
        "device": "cpu",
        "on_cpu": True,
        "vocab_size": 258,
        "max_context": 2048,
        "max_rows": 8,
        "max_queue": 16,
        "kv_limit_bytes": 1 << 20,
        "kv_bytes_per_token": 64,
        "weight_bytes": 1 << 20,
        "limits": Limits(8, 64, 1 << 20, KVGeometry(64), draft_tokens=3),
        "hidden_size": 4,
    }
    return ModelInfo(**{**facts, **changes})


def step_stats(latencies: Sequence[float] = (0.1,), finished: int = 1) -> StepStats:
    """Statistics of one step, in which every field is set."""
    choice = FinishedChoice("stop", 10, 5, 16, 1, 100.0, 101.0, 103.0, 107.0, 4)
    return StepStats(
        duration=0.5,
        phases={
            "schedule": 0.1,
            "encode": 0.1,
            "launch": 0.1,
            "wait": 0.2,
            "mask": 0.1,
            "output": 0.1,
        },
        rows=4,
        running=3,
        waiting=2,
        adapters_running=1,
        prefill_tokens=10,
        decode_tokens=3,
        ended_prefill_tokens=8,
        drafts=2,
        draft_tokens=5,
        accepted_tokens=[2, 0],
        ended_rows=3,
        ended_tokens=5,
        ended_seconds=0.5,
        prefix_queries=14,
        prefix_hits=4,
        prefix_bytes=256,
        prefix_evictions=2,
        store_files=dict.fromkeys(("written", "read", "dropped", "failed", "evicted", "broken"), 1),
        store_io_bytes={"written": 300, "read": 200},
        store_read_seconds=0.2,
        store_bytes={"disk": 100, "queue": 50},
        preemptions=1,
        resumed={"memory": 3, "disk": 2, "recompute": 1},
        swapped_bytes={"memory": 70, "disk": 60},
        grammar_hits=1,
        image_queries=2,
        image_hits=1,
        image_seconds=[0.1],
        image_bytes=1000,
        rows_failed={"nonfinite_logits": 1},
        grammar_seconds=[0.1],
        total_columns=100,
        padded_columns=25,
        kv_reserved_bytes=4096,
        kv_used_bytes=512,
        kv_limit_bytes=1024,
        memory_active=7,
        memory_peak=9,
        memory_cache=8,
        output_tokens=1 + len(latencies),
        first_token_latencies=[0.3],
        inter_token_latencies=list(latencies),
        finished=[choice] * finished,
    )
