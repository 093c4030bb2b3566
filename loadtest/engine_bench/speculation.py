"""The measurement of speculative decoding: tokens a second with drafts and without."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

from chairlift.engine.messages import Submit
from chairlift.engine.speculation.proposal import Proposal, Proposer
from chairlift.loadtest.engine_bench.engines import BenchRequest, Ours
from chairlift.loadtest.engine_bench.measure import await_rows
from chairlift.scheduler.sequence import Sequence

# Tokens of each row that are timed, on average, and those before them, while the engine learns what
# drafts cost. As many with drafts as without, so that both read the same keys and values.
TIMED, WARM = 128, 384
# Tokens of a reply: rows that begin early have drafts while the prompts of others are computed.
OUTPUT = 1280
# Tokens that an oracle draws in advance.
DRAWN = 4096


class Oracle:
    """Proposes tokens each of which is right with the same probability.

    Args:
        right: the only token of the output.
        probability: from 0 to 1.
    """

    def __init__(self, right: int, probability: float, rng: random.Random) -> None:
        self._rng = rng
        # Proposals are cut out of this: a draw for each token would take longer than most real
        # proposers do, while the device waits.
        self._tokens = [right if rng.random() < probability else right ^ 1 for _ in range(DRAWN)]

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        start = int(self._rng.random() * (DRAWN - count))
        return Proposal(self._tokens[start : start + count], "oracle")


def oracles(probability: float) -> Callable[[Submit], list[Proposer]]:
    """Makes the oracle of each request whose output has only one token."""
    rng = random.Random(0)

    def propose(request: Submit) -> list[Proposer]:
        (right,) = request.params.logit_bias
        return [Oracle(right, probability, rng)]

    return propose


class Rate(NamedTuple):
    """The speed of decode steps.

    Attributes:
        tokens_per_s: of all rows together.
        proposed: tokens of drafts, for each row and step.
        accepted: those of them that were right.
    """

    tokens_per_s: float
    proposed: float
    accepted: float


def decode_rate(engine: Ours, rows: int, context: int, vocabulary: int) -> Rate:
    """Times decode steps of ``rows`` rows with prompts of ``context`` tokens.

    Each row repeats a token of its own. So its tokens are known, however the sums of a step are
    rounded.

    Raises:
        ValueError: rows end before enough tokens were timed.
    """
    rng = random.Random(1)
    for _ in range(rows):
        prompt = [rng.randrange(vocabulary) for _ in range(context)]
        # Another one than its neighbour's, and not the last of an odd vocabulary.
        engine.add([BenchRequest(prompt, OUTPUT, repeated=rng.randrange(vocabulary - 1))])
    await_rows(engine, rows)
    _generate(engine, rows * WARM)
    before, start = engine.drafted, time.perf_counter()
    steps, tokens = _generate(engine, rows * TIMED)
    seconds = time.perf_counter() - start
    after = engine.drafted
    return Rate(
        tokens / seconds,
        (after.proposed - before.proposed) / (steps * rows),
        (after.accepted - before.accepted) / (steps * rows),
    )


def _generate(engine: Ours, least: int) -> tuple[int, int]:
    """Runs the engine for so many tokens; returns its steps and tokens.

    Raises:
        ValueError: a row ended before.
    """
    steps = tokens = 0
    while tokens < least:
        turn = engine.step()
        steps += 1
        tokens += turn.tokens
        if turn.ended:
            raise ValueError(f"a row ended before {least} tokens of all rows")
    return steps, tokens
