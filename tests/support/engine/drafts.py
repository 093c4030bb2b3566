"""Proposers that know the right tokens, and a choice of drafts that does not depend on time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from chairlift.engine.core.core import EngineCore
from chairlift.engine.messages import Submit
from chairlift.engine.speculation.proposal import Proposal, Proposer
from chairlift.scheduler.drafts import Chosen, Drafts
from chairlift.scheduler.sequence import Sequence


class Oracle:
    """Proposes a request's right tokens, each of them replaced by another with probability
    ``wrong``.
    """

    def __init__(self, right: list[list[int]], wrong: float, random_: random.Random) -> None:
        self._right = right
        self._wrong = wrong
        self._random = random_

    def propose(self, sequence: Sequence, count: int) -> Proposal | None:
        done = len(sequence.tokens) - sequence.prompt_tokens
        tokens = self._right[sequence.index][done : done + count]
        proposed = [
            self._random.randrange(3, 60) if self._random.random() < self._wrong else token
            for token in tokens
        ]
        return Proposal(proposed, "oracle") if proposed else None


def oracles(
    right: Mapping[str, list[list[int]]], wrong: float, seed: int = 0
) -> Callable[[Submit], list[Proposer]]:
    """Makes the oracle of each request; ``right`` has the tokens of its choices."""
    random_ = random.Random(seed)
    return lambda submit: [Oracle(right[submit.request_id], wrong, random_)]


def verify_any(core: EngineCore, seed: int = 0) -> list[int]:
    """Lets each step verify drafts of random lengths, whatever they cost.

    Returns:
        A list to which each step with drafts adds the number of its draft tokens.
    """
    random_ = random.Random(seed)
    verified: list[int] = []
    scheduler = core.scheduler
    uniform = not core.limits.geometry.pads

    def choose(drafts: Drafts) -> Chosen:
        rows = [s for s in scheduler.running if s.num_tokens < s.max_total_tokens]
        rooms = {s: s.max_total_tokens - s.num_tokens - 1 for s in rows}
        chosen: Chosen = {}
        if uniform and rows and drafts:
            length = min(random_.randrange(core.limits.draft_tokens), *rooms.values(), 99)
            for s in rows if length else ():
                own = drafts[s].tokens if s in drafts else []
                chosen[s] = [*own, *[3] * length][:length]
        elif not uniform:
            for s in rows:
                tokens = drafts[s].tokens[: rooms[s]] if s in drafts else []
                if tokens := tokens[: random_.randrange(len(tokens) + 1)]:
                    chosen[s] = tokens
        if chosen:
            verified.append(sum(map(len, chosen.values())))
        return chosen

    scheduler.choose_drafts = choose  # type: ignore[method-assign]
    return verified
