"""Requests of all kinds have the outputs that they have alone and without drafts.

Beside others they join, leave, are aborted, resumed and preempted, with extreme sampling options
and drafts of any quality. The counts of drafts are those of the drafts that steps have verified.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from support.engine.bench import Bench
from support.engine.drafts import verify_any
from support.engine.grammars import compiler
from support.engine.pages import HostPages
from support.tiny import VOCAB_SIZE, TinyKind, tiny_model

from chairlift.engine.cpu import kernels
from chairlift.engine.messages import (
    Abort,
    Grammar,
    Resumed,
    SamplingParams,
    Submit,
    Thinking,
    TokenLogprobs,
)
from chairlift.engine.model import attention
from chairlift.engine.speculation.proposal import Proposal, Proposer, proposers
from chairlift.scheduler.sequence import Sequence

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("small_blocks")]
TOKENS = range(VOCAB_SIZE)
# Rounding in float32, relative to the largest logits.
TOLERANCE = 2e-3
SOMETIMES: list[tuple[float, list[dict[str, Any]]]] = [
    (0.5, [{"temperature": t} for t in (1e-40, 1e-5, 0.3, 1.0, 3.0, 1e6)]),
    (0.3, [{"top_k": k} for k in (1, 7, VOCAB_SIZE, 2**31 - 1)]),
    (0.3, [{"top_p": p} for p in (0.0, 1e-9, 0.8, 0.999999)]),
    (0.3, [{"min_p": p} for p in (1e-30, 0.05, 1.0)]),
    (0.2, [{"repetition_penalty": p} for p in (0.01, 1.3, 100.0)]),
    (0.2, [{"presence_penalty": p} for p in (-2.0, 2.0)]),
    (0.2, [{"frequency_penalty": p} for p in (-2.0, 0.3, 2.0)]),
    (0.2, [{"logit_bias": dict.fromkeys(TOKENS, b)} for b in (-100.0, 100.0)]),
    (0.2, [{"logit_bias": {7: 5.0, 9: 100.0}}]),
    (0.3, [{"stop_token_ids": ids} for ids in ((0,), tuple(range(0, 250, 3)), tuple(TOKENS))]),
    (0.2, [{"min_tokens": n} for n in (1, 9, 2**31 - 1)]),
    (0.3, [{"logprobs": k} for k in (0, 5, 20)]),
    (
        0.3,
        [
            {"grammar": Grammar("regex", "(ab|cd){3,9}[x-z]*"), "stop_token_ids": (0,)},
            {"grammar": Grammar("json_object"), "stop_token_ids": (0, 2)},
            {"thinking": Thinking(end=(9, 10), budget=4)},
        ],
    ),
]
CASES: dict[str, tuple[TinyKind, dict[str, Any]]] = {
    "eager": ("llama", {"eager": True, "prefix": 1 << 20}),
    "in bands": ("gemma3", {"eager": True, "bands": 3, "swap": 1 << 22}),
    "lazy": ("qwen3", {"prefix": 1 << 20, "prefix_drafts": True, "swap": 1 << 14}),
    "recurrent": ("lfm2", {"swap": 1 << 22}),
    "pages": ("gemma3", {"kernels": HostPages(), "prefix": 1 << 18, "prefix_drafts": True}),
    "recurrent in pages": ("lfm2", {"kernels": HostPages(), "swap": 1 << 22}),
}


@dataclass(slots=True)
class Reply:
    """The outputs of one choice."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    end: tuple[str | None, bool, str | None]
    drafted: tuple[int, int]


class Guesses:
    """Proposes a choice's right tokens, some of them replaced, or any tokens."""

    def __init__(self, right: list[Reply], random_: random.Random) -> None:
        self._right = right
        self._random = random_
        self._wrong = random_.choice([0.0, 0.2, 1.0])

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        done = len(sequence.tokens) - sequence.prompt_tokens
        tokens = self._right[sequence.index].tokens[done : done + count] or [7] * count
        drawn = [self._random.random() < self._wrong for _ in tokens]
        guess = [
            self._random.choice(TOKENS) if wrong else token
            for token, wrong in zip(tokens, drawn, strict=True)
        ]
        return Proposal(guess, "guess") if self._random.random() < 0.8 else None


def _requests(random_: random.Random) -> list[Submit]:
    shared = [random_.choice(TOKENS) for _ in range(30)]
    found = []
    for number in range(10):
        params: dict[str, Any] = {"max_tokens": random_.randrange(1, 45), "temperature": 0.0}
        for chance, options in SOMETIMES:
            if random_.random() < chance:
                params |= random_.choice(options)
        period = [random_.choice(TOKENS) for _ in range(random_.randrange(1, 9))]
        prompt = shared[: random_.choice([0, 0, 30])] + period * random_.randrange(1, 4)
        n = 3 if random_.random() < 0.2 else 1
        found.append(Submit(str(number), prompt, SamplingParams(seed=number - 5, **params), n))
    return found


def _replies(bench: Bench, request: Submit) -> list[Reply]:
    replies = []
    for index in range(request.n):
        outputs = bench.outputs[request.request_id, index]
        last = outputs[-1]
        replies.append(
            Reply(
                [token for output in outputs for token in output.token_ids],
                [scores for output in outputs for scores in output.logprobs or ()],
                (last.finish, last.ended_by_token, last.error),
                (sum(o.accepted for o in outputs), sum(o.rejected for o in outputs)),
            )
        )
    return replies


def _assert_alike(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    def numbers(scores: list[TokenLogprobs]) -> list[list[float]]:
        return [[each.logprob, *(value for _, value in each.top)] for each in scores]

    assert len(found) == len(expected)
    for own, right in zip(numbers(found), numbers(expected), strict=True):
        assert own == pytest.approx(right, rel=TOLERANCE, abs=TOLERANCE)


def _resumed(request: Submit, replies: list[Reply], random_: random.Random) -> tuple[Resumed, ...]:
    """The choices of a request that another engine has begun."""
    if random_.random() < 0.8 or any(reply.end[2] for reply in replies):
        return ()
    outputs = [reply.tokens[: random_.randrange(len(reply.tokens))] for reply in replies]
    return tuple(Resumed(index, output) for index, output in enumerate(outputs))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(2))
def test_outputs_and_counts(case: str, seed: int) -> None:
    kind, settings = CASES[case]
    random_ = random.Random(f"{case} {seed}")
    model = tiny_model(kind, seed=6)
    (kernels.install if "eager" in settings else attention.install)(model)
    requests = _requests(random_)
    own = {name: settings[name] for name in ("eager", "kernels") if name in settings}
    alone = Bench(model, compiler=compiler(), **own)
    expected: dict[str, list[Reply]] = {}
    for request in requests:
        alone.core.submit(request)
        alone.drain()
        expected[request.request_id] = _replies(alone, request)

    def propose(request: Submit) -> list[Proposer]:
        return [
            Guesses(expected[request.request_id.removeprefix("-")], random_),
            *proposers(request),
        ]

    longest = max(len(request.prompt) + request.params.max_tokens for request in requests)
    memory = int(2 * alone.core.limits.bytes_alone(longest)) if "kernels" not in settings else None
    bench = Bench(
        model, compiler=compiler(), draft=5, propose=propose, kv=memory, tokens=60, **settings
    )
    verify_any(bench.core, seed)
    verified: list[tuple[Sequence, int, list[int]]] = []
    launch = bench.core.pipeline.launch

    def watched(plan: Any, timer: Any) -> None:
        for sequence, draft in plan.drafts.items():
            if draft:
                verified.append((sequence, len(sequence.tokens), list(draft)))
        launch(plan, timer)

    bench.core.pipeline.launch = watched  # type: ignore[method-assign]
    begun: dict[str, tuple[Resumed, ...]] = {}
    for request in requests:
        replies = expected[request.request_id]
        begun[request.request_id] = _resumed(request, replies, random_)
        prediction = random_.choice([[], replies[0].tokens, [*replies[0].tokens[3:], 5, 6]])
        bench.core.submit(
            Submit(
                *(request.request_id, request.prompt, request.params, request.n),
                prediction=prediction,
                resumed=begun[request.request_id],
            )
        )
        # The canary's repetitions, which no metric counts; most are aborted.
        canary = msgspec.structs.replace(request, request_id=f"-{request.request_id}", replay=True)
        if random_.random() < 0.3:
            bench.core.submit(canary)
        for _ in range(random_.randrange(5)):
            bench.step()
        if random_.random() < 0.8:
            bench.core.abort(Abort(canary.request_id))
    bench.drain()
    drafted = [0, 0]
    for request in requests:
        replies, right = _replies(bench, request), expected[request.request_id]
        for index in range(request.n):
            before = begun[request.request_id]
            skipped = len(before[index].output) if before else 0
            assert replies[index].tokens == right[index].tokens[skipped:], request
            assert replies[index].end == right[index].end, request
            _assert_alike(replies[index].logprobs, right[index].logprobs[skipped:])
            drafted = [a + b for a, b in zip(drafted, replies[index].drafted, strict=True)]
    assert sum(stats.output_tokens for stats in bench.stats) == sum(
        len(output.token_ids)
        for (name, _), outputs in bench.outputs.items()
        for output in outputs
        if not name.startswith("-")
    )
    failed = {name for name, replies in expected.items() if replies[0].end[2]}
    verified = [each for each in verified if each[0].request_id in expected.keys() - failed]
    accepted = sum(_right(draft, sequence.tokens[at:]) for sequence, at, draft in verified)
    assert len(verified) > 10
    assert drafted == [accepted, sum(len(draft) for *_, draft in verified) - accepted]
    if not failed:
        assert sum(stats.drafts for stats in bench.stats) == len(verified)
        assert sum(stats.draft_tokens for stats in bench.stats) == sum(drafted)
        assert sum(sum(stats.accepted_tokens) for stats in bench.stats) == accepted


def _right(draft: list[int], tokens: list[int]) -> int:
    """How many first tokens of a draft became output."""
    pairs = zip(draft, tokens, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(tokens)))
