"""Another rank does what rank 0 does, in generated schedules of requests; both in one process."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from itertools import count
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from support.engine.drafts import verify_any
from support.engine.grammars import compiler
from support.engine.swap import squeeze
from support.tiny import VOCAB_SIZE, tiny_model

from chairlift.cache.swap.swap import Swap
from chairlift.engine.core.core import EngineCore
from chairlift.engine.core.prepared_model import PreparedModel, prepare_model
from chairlift.engine.errors import EngineDead
from chairlift.engine.messages import Abort, Grammar, SamplingParams, StepStats, Submit, Thinking
from chairlift.engine.model.trials.probe import probe
from chairlift.engine.parallel.journal import MAX_EVENTS, Broadcast, Ended, Learned, Turn
from chairlift.engine.process.follower import Follower
from chairlift.engine.speculation.proposal import NgramProposer, Proposal
from chairlift.scheduler.cost import Work
from chairlift.scheduler.limits import Limits
from chairlift.scheduler.sequence import Sequence

STEPS = 30
KV_TOKENS = 1200
GRAMMAR = Grammar("regex", "[a-z]{3,9}")
KINDS = ("llama", "lfm2")
_models: dict[str, tuple[Any, PreparedModel]] = {}


class LastAgain:
    """Proposes the last token again, so that there are drafts in any schedule."""

    def propose(self, sequence: Sequence, count: int) -> Proposal:
        return Proposal(sequence.tokens[-1:] * count, "last")


class Pair:
    """Rank 0's core and a follower's, which gets each turn as bytes."""

    def __init__(self, kind: Any, bands: int = 1) -> None:
        if kind not in _models:
            model = tiny_model(kind)
            _models[kind] = probe(model, kind), prepare_model(model, VOCAB_SIZE)
        (geometry, _, layers), prepared = _models[kind]
        limits = Limits(
            *(6, 48, KV_TOKENS * geometry.bytes_per_token + 12 * geometry.row_bytes, geometry),
            checkpoint=None if geometry.pads else 64,
            # Chunks are cut by the measured time, which the follower must not measure itself.
            step_seconds=1e-4,
            bands=bands,
            draft_tokens=4,
        )
        kinds = [layer.kind for layer in layers]
        outcomes: deque[mx.array] = deque()

        def agree(mine: mx.array) -> mx.array:
            outcomes.append(mine)
            return mine

        def swap() -> Swap[Sequence]:
            return Swap(kinds, 60 * geometry.bytes_per_token + 4 * geometry.row_bytes)

        self.turns: deque[bytes] = deque()
        self.leader = EngineCore(
            *(replace(prepared, agree=agree), limits, 1 << 18, None, swap(), compiler()),
            journal=Broadcast(lambda turn: self.turns.append(msgspec.msgpack.encode(turn))),
            propose=lambda submit: [NgramProposer(1, 2, submit.prompt), LastAgain()],
        )
        theirs = replace(prepared, agree=lambda mine: outcomes.popleft())
        self.follower = Follower(
            lambda background: EngineCore(
                *(theirs, limits, 1 << 18, None, swap()), background=(background,)
            )
        )
        self.stats: list[StepStats] = []
        self.finished: list[str] = []
        self.ended: set[tuple[str, int]] = set()

    def step(self) -> None:
        output = self.leader.step()
        self.stats.append(output.stats)
        self.finished += [o.finish for o in output.outputs if o.finish]
        self.ended = {(o.request_id, o.index) for o in output.outputs if o.finish}
        self.follow()

    def follow(self) -> None:
        while self.turns:
            self.follower.take(msgspec.msgpack.decode(self.turns.popleft(), type=Turn))
        self.follower.core.scheduler.check_integrity()

    def assert_alike(self) -> None:
        one, two = self.leader, self.follower.core
        assert [named(s) for s in one.batch.rows] == [named(s) for s in two.batch.rows]
        assert one.batch.offsets == two.batch.offsets
        # The bytes of all states are in the digest of the next plan: until then the follower keeps
        # those of sequences that have just ended.
        assert one.prefixes.nbytes == two.prefixes.nbytes
        tokens = {named(s): s.tokens for s in two.scheduler}
        for sequence in one.scheduler:
            assert tokens[named(sequence)] == sequence.tokens
        if len(self.stats) % 8:
            return
        for mine, theirs in zip(one.batch.bands, two.batch.bands, strict=True):
            for a, b in zip(mine.state, theirs.state, strict=True):
                assert mx.allclose(a, b, atol=1e-4).item()


def named(sequence: Sequence) -> tuple[str, int]:
    return sequence.request_id, sequence.index


def submitted(chosen: random.Random, name: str) -> Submit:
    """A random request; many prompts begin alike."""
    prompt = [7 + i % 50 for i in range(chosen.choice([0, 0, 0, 34, 40]))]
    prompt += [chosen.randrange(3, VOCAB_SIZE) for _ in range(chosen.randint(1, 12))]
    params: dict[str, Any] = {"temperature": chosen.choice([0.0, 0.9])}
    if chosen.random() < 0.2:
        params |= {"repetition_penalty": 1.3, "logprobs": 2, "stop_token_ids": (20, 21, 22)}
    if chosen.random() < 0.2:
        params["grammar"] = GRAMMAR
    elif chosen.random() < 0.1:
        params["thinking"] = Thinking(end=(9, 10), budget=3)
    pooling: Any = "mean" if chosen.random() < 0.1 else None
    size = 0 if pooling else chosen.randint(1, 16)
    return Submit(
        name,
        prompt,
        SamplingParams(size, chosen.randrange(1000), **params),
        n=1 if pooling else chosen.choice([1, 1, 1, 2, 3]),
        cache_salt=chosen.choice(["", "", "other"]),
        priority=chosen.choice([0, 0, 1, -1]),
        replay=chosen.random() < 0.1,
        prompt_logprobs=1 if not pooling and chosen.random() < 0.1 else None,
        pooling=pooling,
    )


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_follower_does_the_same_in_any_schedule(kind: str, drafts: bool, seed: int) -> None:
    chosen = random.Random(KINDS.index(kind) + 2 * seed)
    pair: Any = Pair(kind, bands=1 + KINDS.index(kind) % 2)
    verified = verify_any(pair.leader) if drafts else []
    names = count()
    for _ in range(STEPS):
        for _ in range(chosen.choice([0, 1, 2])):
            pair.leader.submit(submitted(chosen, str(next(names))))
        unfinished = [s.request_id for s in pair.leader.scheduler]
        if unfinished and chosen.random() < 0.15:
            pair.leader.abort(Abort(chosen.choice(unfinished), chosen.choice([None, 0])))
        if unfinished and chosen.random() < 0.05:
            pair.leader.withdraw(chosen.choice(unfinished))
        # Only rank 0 chooses drafts, when measured times make it worth a try.
        for _ in range(chosen.choice([0, 1])):
            pair.leader.scheduler.choose_drafts({})
        if not pair.leader.idle:
            squeeze(pair, chosen.choice([2, 3, 9, 9, 9]))
            pair.assert_alike()
    while not pair.leader.idle or pair.leader.scheduler.waiting:
        pair.step()
    pair.assert_alike()
    # The next step's turn would say that these have ended.
    assert {named(s) for s in pair.follower.core.scheduler} <= pair.ended
    assert sum(s.preemptions for s in pair.stats)
    assert sum(s.prefix_hits for s in pair.stats)
    assert sum(s.resumed.get("memory", 0) for s in pair.stats)
    assert {"stop", "length"} <= set(pair.finished)
    assert (len(verified) > 3) == drafts


@pytest.mark.parametrize("lost", [Ended, Learned])
def test_a_follower_that_would_compute_another_step_ends(lost: type) -> None:
    """Ranks that compute different steps would wait for each other forever."""
    pair = Pair("llama")
    chosen = random.Random(1)
    for name in range(12):
        pair.leader.submit(submitted(chosen, str(name)))
    for _ in range(4):
        pair.leader.step()
    for running in list(pair.leader.scheduler.running):
        pair.leader.abort(Abort(running.request_id))
    while not pair.leader.idle:
        pair.leader.step()
    turns = [msgspec.msgpack.decode(turn, type=Turn) for turn in pair.turns]
    assert any(isinstance(event, lost) for turn in turns for event in turn.events)
    for turn in turns:
        turn.events[:] = [event for event in turn.events if not isinstance(event, lost)]
    with pytest.raises(EngineDead, match="plan"):
        deque(map(pair.follower.take, turns))


def test_a_flushed_journal_leaves_nothing_to_the_next_engine() -> None:
    turns: list[Turn] = []
    journal = Broadcast(turns.append)
    journal.learned(Work(1, 2), 0.5)
    journal.flush()
    journal.flush()
    assert [turn.events for turn in turns] == [[Learned(Work(1, 2), 0.5)], []]
    assert {turn.digest for turn in turns} == {None}


def test_a_journal_without_steps_does_not_grow() -> None:
    turns: list[Turn] = []
    journal = Broadcast(turns.append)
    for number in range(2 * MAX_EVENTS + 1):
        journal.ready([str(number)])
    assert [len(turn.events) for turn in turns] == [MAX_EVENTS] * 2
    assert {turn.digest for turn in turns} == {None}
