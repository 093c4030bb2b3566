"""Nothing is evaluated while another thread may dispatch a step, whatever is requested."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from support.engine.bench import Bench
from support.engine.drafts import oracles, verify_any
from support.engine.grammars import compiler
from support.engine.late_dispatch import late_dispatch
from support.engine.pages import HostPages
from support.tiny import TinyKind, tiny_model

from chairlift.engine.core.pipeline import LaunchOrder
from chairlift.engine.device.dispatch import CallerDispatch, Dispatcher
from chairlift.engine.messages import Abort, Grammar, TokenOutput
from chairlift.engine.model import attention
from chairlift.engine.model.trials.probe import probe

pytestmark = pytest.mark.usefixtures("same_stream", "small_blocks")

REQUESTS = 14
# The requests depend on the seed, not on the kind, so each kind has other seeds.
SEEDS: dict[TinyKind, tuple[int, int]] = {"llama": (0, 3), "gemma3": (1, 4), "lfm2": (2, 5)}
Outputs = dict[tuple[str, int], list[TokenOutput]]
Plain = Callable[[TinyKind, int], Outputs]
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 7, "min_p": 0.01},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3},
    {"presence_penalty": 0.4, "logit_bias": {7: 3.0}},
    {"logprobs": 2},
    {"min_tokens": 4, "stop_token_ids": (30, 31, 32, 33)},
)
READING: tuple[dict[str, Any], ...] = (
    *({},) * 3,
    {"pooling": "mean"},
    {"pooling": "last"},
    {"prompt_logprobs": 2},
)
GRAMMAR = Grammar("regex", "(ab|cd){2,9}e?")


def _bench(kind: TinyKind, dispatcher: Dispatcher, folder: Path, **options: Any) -> Bench:
    model = tiny_model(kind)
    attention.install(model)
    size = probe(model, kind).geometry.bytes_per_token
    folder.mkdir()
    bench = Bench(
        model,
        dispatcher=dispatcher,
        kernels=HostPages(),
        rows=6,
        kv=300 * size,
        prefix=120 * size,
        swap=1 << 26,
        directory=folder,
        compiler=compiler(),
        **options,
    )
    assert bench.core.pipeline.order is LaunchOrder.QUEUED
    return bench


def _served(bench: Bench, seed: int) -> Outputs:
    """The outputs of random requests of all forms, which come one by one; some are aborted.

    Then come rows that outgrow the memory together, so that some are preempted.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(3, 60) for _ in range(70)]
    for number in range(REQUESTS):
        prompt = shared[: rng.choice([0, 30, 70])]
        prompt = prompt + [rng.randrange(3, 60) for _ in range(rng.randrange(1, 70))]
        reading = rng.choice(READING)
        params = dict(rng.choice(SAMPLING))
        if rng.random() < 0.2:
            params |= {"grammar": GRAMMAR, "stop_token_ids": (0, 2)}
        count = 0 if "pooling" in reading else rng.randrange(1, 30)
        bench.submit(
            *(str(number), prompt, count, 1 + rng.randrange(2)),
            reading=reading,
            **params | {"seed": number},
        )
        if rng.random() < 0.2:
            bench.core.abort(Abort(str(rng.randrange(number + 1)), "abort"))
        for _ in range(rng.randrange(5)):
            bench.step()
    for number, params in enumerate(SAMPLING):
        own = {"seed": seed, **params}
        bench.submit(f"long {number}", [7 + number], 75, **own)
    bench.drain()
    assert sum(stats.preemptions for stats in bench.stats)
    return bench.outputs


def _assert_same(found: list[TokenOutput], expected: list[TokenOutput]) -> None:
    """The same tokens; an aborted request may have more or fewer of them in one of the engines."""
    assert [output.error for output in found] == [None] * len(found)
    tokens, wanted = ([t for o in each for t in o.token_ids] for each in (found, expected))
    shortest = min(len(tokens), len(wanted))
    assert tokens[:shortest] == wanted[:shortest]
    vectors, others = ([_vector(o) for o in each if o.embedding] for each in (found, expected))
    np.testing.assert_allclose(vectors, others, atol=1e-4)


def _vector(output: TokenOutput) -> np.ndarray[Any, Any]:
    assert output.embedding is not None
    return np.frombuffer(output.embedding, np.float32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """The outputs of an engine that evaluates in the thread that steps, without drafts."""

    @functools.cache
    def served(kind: TinyKind, seed: int) -> Outputs:
        folder = tmp_path_factory.mktemp("plain") / "caller"
        return _served(_bench(kind, CallerDispatch(), folder), seed)

    return served


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind in SEEDS for seed in SEEDS[kind]])
def test_random_requests(
    kind: TinyKind, seed: int, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plain(kind, seed)
    with late_dispatch(monkeypatch) as dispatcher:
        found = _served(_bench(kind, dispatcher, tmp_path / "late"), seed)
    assert dispatcher.found == []
    assert found.keys() == expected.keys()
    for choice, outputs in found.items():
        _assert_same(outputs, expected[choice])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SEEDS)
def test_drafts(
    kind: TinyKind, plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = SEEDS[kind][0]
    expected = plain(kind, seed)
    tokens = {choice: [t for o in each for t in o.token_ids] for choice, each in expected.items()}
    # A request that was aborted early may have no tokens without drafts.
    names = [*map(str, range(REQUESTS)), *(f"long {n}" for n in range(len(SAMPLING)))]
    right = {name: [tokens.get((name, n), []) for n in range(2)] for name in names}
    with late_dispatch(monkeypatch) as dispatcher:
        drafts: dict[str, Any] = {"draft": 4, "propose": oracles(right, 0.3)}
        bench = _bench(kind, dispatcher, tmp_path / "late", **drafts)
        verified = verify_any(bench.core, 9)
        found = _served(bench, seed)
    assert (dispatcher.found, len(verified) > 5) == ([], True)
    for choice, outputs in found.items():
        _assert_same(outputs, expected.get(choice, []))


@pytest.mark.parametrize("read", [lambda a: mx.eval(a), lambda a: a.tolist(), lambda a: bool(a)])
def test_it_finds_an_early_evaluation(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with late_dispatch(monkeypatch) as dispatcher:
        before = mx.ones(()) + 1
        mx.eval(before)
        dispatcher.dispatch([before + 2])
        assert before.item() == 2
        assert dispatcher.found == []
        with pytest.raises(RuntimeError, match="in current thread"):
            read(before * 3)
        assert len(dispatcher.found) == 1
        dispatcher.wait_dispatched()
        assert read(before * 3) in (None, 6, True)
