"""An engine over pages whose steps another thread dispatches."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from support.engine.bench import Bench, serve_random
from support.engine.drafts import oracles, verify_any
from support.engine.late_dispatch import late_dispatch
from support.engine.pages import HostPages
from support.tiny import TinyKind, tiny_model

from chairlift.engine.core.pipeline import LaunchOrder
from chairlift.engine.core.step import Step
from chairlift.engine.device.dispatch import CallerDispatch, Dispatcher, ThreadDispatch
from chairlift.engine.messages import Abort
from chairlift.engine.model import attention
from chairlift.engine.model.paged import compiled, forward, inputs
from chairlift.engine.model.paged.forward import PagedForward
from chairlift.engine.model.trials.probe import probe

pytestmark = pytest.mark.usefixtures("same_stream", "small_blocks")


def _bench(kind: TinyKind, dispatcher: Dispatcher, **settings: object) -> Bench:
    model = tiny_model(kind)
    attention.install(model)
    bench = Bench(model, dispatcher=dispatcher, kernels=HostPages(), **settings)  # type: ignore[arg-type]
    assert bench.core.pipeline.order is LaunchOrder.QUEUED
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_tokens_are_the_same(kind: TinyKind, tmp_path: Path) -> None:
    """While rows join, leave, share prefixes that go to disk, and are preempted."""
    size = probe(tiny_model(kind), kind).geometry.bytes_per_token

    def tokens(make: Callable[[], Dispatcher], folder: str) -> dict[str, list[int]]:
        bench = _bench(
            *(kind, make()),
            rows=6,
            kv=240 * size,
            prefix=80 * size,
            swap=1 << 26,
            directory=tmp_path / folder,
        )
        for i in range(4):
            bench.submit(f"long {i}", [7 + i], 70)
        found = serve_random(bench, 12, seed=7)
        found |= {f"long {i}": bench.tokens(f"long {i}") for i in range(4)}
        assert sum(stats.preemptions for stats in bench.stats)
        bench.core.close(1)
        return found

    assert tokens(ThreadDispatch, "thread") == tokens(CallerDispatch, "caller")


def test_drafts_logprobs_and_aborted_requests() -> None:
    """Such steps need what the one before has computed; aborts come between two steps."""

    def tokens(make: Callable[[], Dispatcher]) -> list[object]:
        plain = _bench("llama", make())
        prompts = [[random.Random(i).randrange(3, 60) for _ in range(9 + i)] for i in range(5)]
        for i, prompt in enumerate(prompts):
            plain.submit(str(i), prompt, 16, n=1 + i % 2, logprobs=i)
        for _ in range(8):
            plain.step()
        plain.core.abort(Abort("2", "abort"))
        plain.drain()
        outputs = [plain.tokens(str(i)) for i in range(5)]
        read = [output.logprobs for each in plain.outputs.values() for output in each]
        right = {str(i): [own] for i, own in enumerate(outputs)}
        drafted = _bench("llama", make(), draft=4, propose=oracles(right, 0.3))
        verify_any(drafted.core)
        for i, prompt in enumerate(prompts):
            drafted.submit(str(i), prompt, len(outputs[i]))
        drafted.drain()
        assert sum(stats.accepted_tokens != [] for stats in drafted.stats)
        assert [drafted.tokens(str(i)) for i in range(5)] == outputs
        return [outputs, read]

    assert tokens(ThreadDispatch) == tokens(CallerDispatch)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_compiled_steps_are_built_while_others_are_dispatched(
    drafts: bool, traceable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written here by compiled steps, so only both engines' tokens can be compared."""
    monkeypatch.setattr(compiled, "STEADY", 0)
    monkeypatch.setattr(inputs, "FEW_COLUMNS", 12)
    monkeypatch.setattr(forward, "COMPILED_TOKENS", 256)

    def tokens(make: Callable[[], Dispatcher]) -> tuple[dict[str, list[int]], int]:
        model = tiny_model("llama", head_dim=32)
        attention.install(model)
        guesses: dict[str, list[list[int]]] = defaultdict(lambda: [[7] * 99])
        options = {"draft": 4, "propose": oracles(guesses, 0.0)} if drafts else {}
        pages = {"kernels": HostPages(traceable=True), "kv": 1 << 20}
        bench = Bench(model, dispatcher=make(), rows=4, **pages, **options)  # type: ignore[arg-type]
        core, call = bench.core, bench.core.pipeline.forward
        assert isinstance(call, PagedForward)
        # The tokens are wrong, which is not to be found.
        call._steps._checked = call._chunk_steps._checked = True
        choose = core.scheduler.choose_drafts
        core.scheduler.choose_drafts = (
            lambda found: {  # type: ignore[method-assign]
                s: draft.tokens[:2] for s, draft in found.items() if not choose({})
            }
        )
        for number in range(4):
            bench.submit(str(number), [5 + number] * 20, 40)
        while not core.idle:
            core.speculator._promising = drafts
            bench.step()
        return {name: bench.tokens(name) for name in "0123"}, len(bench.stats)

    expected, steps = tokens(CallerDispatch)
    assert steps > 15
    assert tokens(ThreadDispatch) == (expected, steps)
    with late_dispatch(monkeypatch) as dispatcher:
        assert tokens(lambda: dispatcher) == (expected, steps)
    assert dispatcher.found == []


@pytest.mark.parametrize("make", [CallerDispatch, ThreadDispatch])
def test_a_computed_step_keeps_no_buffers(make: Callable[[], Dispatcher]) -> None:
    """MLX would copy a buffer to which a step still refers when the next one writes it."""
    dispatcher = make()
    before = mx.get_active_memory()
    step = Step(side_effects=[mx.zeros((1 << 20,)) + 1])
    step.dispatch(dispatcher)
    dispatcher.wait_dispatched()
    step.wait()
    mx.synchronize()
    assert mx.get_active_memory() < before + (1 << 20)


def test_an_error_of_a_dispatched_step_ends_the_engine() -> None:
    class Failing(ThreadDispatch):
        def dispatch(self, arrays: object) -> None:
            stream = mx.new_stream(mx.default_device())
            super().dispatch([mx.add(1, 2, stream=stream)])

    bench = _bench("llama", Failing())
    bench.submit("a", [5, 6, 7])
    with pytest.raises(RuntimeError, match="in current thread"):
        bench.drain()


@pytest.mark.parametrize("make", [CallerDispatch, ThreadDispatch])
@pytest.mark.parametrize(
    ("prompt", "beside", "first"),
    [(1, False, True), (64, False, True), (65, False, False), (3, True, False)],
)
def test_a_short_prompt_s_token_does_not_wait_for_the_next_step(
    make: Callable[[], Dispatcher], prompt: int, beside: bool, first: bool
) -> None:
    """Longer prompts and running rows keep the device busy while the next step is built."""
    bench = _bench("llama", make(), tokens=100)
    if beside:
        bench.submit("beside", [5], 9)
        for _ in range(3):
            bench.step()
    bench.submit("one", [7] * prompt, 3)
    launched = 0
    while ("one", 0) not in bench.outputs:
        bench.step()
        stats = bench.stats[-1]
        launched += stats.prefill_tokens + stats.decode_tokens > 0
    assert launched == (1 if first else 2)
    bench.drain()
    assert len(bench.tokens("one")) == 3
