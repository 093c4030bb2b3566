"""Rows with drafts of any quality have the tokens that they would have without."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, Literal, NamedTuple

import pytest
from support.engine.bench import Bench
from support.engine.drafts import oracles, verify_any
from support.engine.llama4 import tiny_llama4
from support.engine.pages import HostPages
from support.tiny import TinyKind, tiny_model

from chairlift.cache.quantized import Quantization
from chairlift.engine.cpu import kernels
from chairlift.engine.model import attention

pytestmark = pytest.mark.usefixtures("small_blocks")
DRAFT = 5


class Request(NamedTuple):
    """A request of a random run; ``begin`` is the step in which it is submitted."""

    name: str
    begin: int
    prompt: list[int]
    params: dict[str, Any]
    n: int = 1


@cache
def _model(kind: TinyKind | Literal["llama4"], eager: bool) -> Any:
    if kind == "llama4":
        model = tiny_llama4(head_dim=32, interleave_moe_layer_step=9)
    else:
        model = tiny_model(kind, seed=6)
    if eager:
        kernels.install(model)
    else:
        attention.install(model)
    return model


def _requests(seed: int, count: int, spread: int = 30, longest: int = 40) -> list[Request]:
    """Requests with all kinds of sampling; some share a prefix."""
    random_ = random.Random(seed)
    shared = [random_.randrange(3, 60) for _ in range(20)]
    requests = []
    for number in range(count):
        prompt = shared[: random_.choice([0, 0, 10, 20])]
        prompt = prompt + [random_.randrange(3, 60) for _ in range(random_.randrange(1, 24))]
        params: dict[str, Any] = {"max_tokens": random_.randrange(1, longest), "seed": number}
        if random_.random() < 0.5:
            params |= {"temperature": random_.choice([0.3, 1.0, 3.0])}
            params |= random_.choice([{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}])
        else:
            params |= {"temperature": 0.0}
        if random_.random() < 0.4:
            penalty = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
            params |= penalty
        if random_.random() < 0.3:
            params |= {"logit_bias": {7: 3.0}, "min_tokens": 9}
            params |= {"stop_token_ids": tuple(range(30, 36))}
        if random_.random() < 0.3:
            params |= {"logprobs": 2}
        n = 3 if random_.random() < 0.2 else 1
        requests.append(Request(str(number), random_.randrange(spread), prompt, params, n))
    return requests


def _run(bench: Bench, requests: list[Request]) -> dict[str, list[list[int]]]:
    """Serves the requests; returns the tokens of the choices of each."""
    step = 0
    waiting = sorted(requests, key=lambda request: request.begin)
    while waiting or not bench.core.idle:
        while waiting and (waiting[0].begin <= step or bench.core.idle):
            request = waiting.pop(0)
            bench.submit(request.name, request.prompt, n=request.n, **request.params)
        bench.step()
        step += 1
    return {
        request.name: [bench.tokens(request.name, index) for index in range(request.n)]
        for request in requests
    }


CASES: dict[str, tuple[TinyKind | Literal["llama4"], dict[str, Any]]] = {
    "eager": ("llama", {"eager": True}),
    "lazy": ("llama", {}),
    "windows in bands": ("gemma3", {"eager": True, "bands": 3}),
    "windows with prefixes": ("gemma3", {"prefix": 1 << 22}),
    "quantized": ("llama4", {"quantization": Quantization(8, 32)}),
    "chunked": ("llama4", {"eager": True}),
    "pages": ("llama", {"kernels": HostPages(), "kv": 1 << 20}),
    "windows in pages": ("gemma3", {"kernels": HostPages(), "kv": 2 << 20, "prefix": 1 << 19}),
    "recurrent": ("lfm2", {}),
    "recurrent in pages": ("lfm2", {"kernels": HostPages(), "kv": 2 << 20, "prefix": 1 << 19}),
    "recurrent with prefixes": ("lfm2", {"eager": True, "prefix": 1 << 22}),
}


# Each case has drafts that are partly wrong, and in turn only right and only wrong ones.
WRONG = [
    (case, wrong)
    for number, case in enumerate(CASES)
    for wrong in (0.4, 0.0 if number % 2 else 1.0)
]


@cache
def _served(case: str) -> tuple[list[Request], dict[str, list[list[int]]]]:
    """Requests of a case, and their tokens without drafts."""
    kind, settings = CASES[case]
    requests = _requests(seed=list(CASES).index(case), count=10, longest=28)
    return requests, _run(Bench(_model(kind, settings.get("eager", False)), **settings), requests)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "wrong"), WRONG)
def test_tokens_are_those_without_drafts(case: str, wrong: float) -> None:
    kind, settings = CASES[case]
    requests, expected = _served(case)
    model = _model(kind, settings.get("eager", False))
    bench = Bench(model, draft=DRAFT, propose=oracles(expected, wrong), **settings)
    verified = verify_any(bench.core)
    assert _run(bench, requests) == expected
    assert len(verified) > 10
    accepted = sum(sum(stats.accepted_tokens) for stats in bench.stats)
    proposed = sum(stats.draft_tokens for stats in bench.stats)
    # Over columns, shorter drafts of models with states are filled with wrong tokens.
    filled = kind == "lfm2" and "kernels" not in settings
    if wrong == 0.0 and not filled:
        assert accepted == proposed > 50
    elif wrong == 1.0:
        assert accepted < 0.1 * proposed


@cache
def _served_long(kind: TinyKind) -> tuple[list[Request], dict[str, list[list[int]]]]:
    """Requests whose rows together outgrow a small memory, and their tokens without drafts."""
    requests = _requests(seed=5, count=8, spread=4, longest=40)
    for number, request in enumerate(requests):
        del request.prompt[6:]
        request.params.update(max_tokens=24 + 2 * number, stop_token_ids=())
    return requests, _run(Bench(_model(kind, False)), requests)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("swap", [0, 1 << 24])
def test_preempted_rows_go_on_with_the_same_tokens(kind: TinyKind, swap: int) -> None:
    model = _model(kind, False)
    requests, expected = _served_long(kind)
    memory = Bench(model).core.limits.bytes_alone(44)
    bench = Bench(
        model, draft=DRAFT, propose=oracles(expected, 0.3), kv=memory, swap=swap, prefix=1 << 20
    )
    verified = verify_any(bench.core)
    assert _run(bench, requests) == expected
    assert sum(stats.preemptions for stats in bench.stats) > 1
    assert len(verified) > 20


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"eager": True}, {"kernels": HostPages(), "kv": 1 << 20}])
def test_a_request_that_comes_again_takes_fewer_steps(settings: dict[str, Any]) -> None:
    """Greedy or with the same seed; another prompt or another salt gets nothing proposed."""
    model = _model("llama", settings.get("eager", False))
    bench = Bench(model, draft=DRAFT, prefix=1 << 22, prefix_drafts=True, **settings)
    verify_any(bench.core)
    prompt = [3 + number % 50 for number in range(70)]
    taken: dict[str, list[int]] = {}
    for name, salt, params in (
        ("first", "", {}),
        ("again", "", {}),
        ("other salt", "secret", {}),
        ("sampled", "", {"temperature": 1.0, "seed": 4}),
        ("sampled again", "", {"temperature": 1.0, "seed": 4}),
    ):
        begin = len(bench.stats)
        bench.submit(name, prompt, 40, salt=salt, **params)
        while not bench.core.idle:
            bench.step()
        stats = bench.stats[begin:]
        taken[name] = [len(stats), sum(sum(s.accepted_tokens) for s in stats)]
    assert bench.tokens("again") == bench.tokens("first") == bench.tokens("other salt")
    assert bench.tokens("sampled again") == bench.tokens("sampled")
    assert taken["first"][1] == taken["other salt"][1] == 0
    for name, earlier in (("again", "first"), ("sampled again", "sampled")):
        assert taken[name][1] > 15
        assert taken[name][0] < 0.6 * taken[earlier][0]
