"""Chooses the replica that computes a request: where its prefix is cached, unless that is busier.

For each replica the router estimates the seconds by which the request and those beside it would be
later, and takes the replica with the least:

    prompt * Q
        it waits for the prompts ahead
    + prompt * (P - hit) * (2 + min(R, rows))
        what is missing of its prompt delays it and the others, and displaces as much from the
        cache, to be computed again
    + 2 * row * min(O, R * output) / gain
        it and the others make each other's steps longer
    + max(0, R + n - rows) / rows * output / gain * step(rows)
        it waits for free rows

Q: prompt tokens at the replica that are not computed yet. P: the prompt's tokens. hit: those that
the replica was sent before. R: its unfinished choices. O: output tokens that these are still
expected to have. n: choices of the request. rows: rows of its batch. output: expected output
tokens of a choice. prompt, row, step(): measured seconds; gain: tokens of a row in a step
(``step_speed``).

So the margin by which the holder of a prefix may be busier is the measured time of computing that
prefix elsewhere, for all that it would delay. Requests that cannot use a cached prefix have
hit = 0 everywhere and are balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from chairlift.engine.client.prefix_index import PrefixIndex, block_hashes
from chairlift.engine.client.step_speed import StepCosts, StepSpeed
from chairlift.engine.messages import Submit


class ReplicaLoad(NamedTuple):
    """A replica's work at the time of a choice.

    Attributes:
        replica: its number.
        prompt: prompt tokens of its requests that are not computed yet.
        output: output tokens that its unfinished choices are expected to have yet.
        choices: its unfinished choices.
        rows: the rows of its batch.
    """

    replica: int
    prompt: int
    output: float
    choices: int
    rows: int


class ChosenReplica(NamedTuple):
    """The chosen replica, and the prompt tokens that its cache is expected to have."""

    replica: int
    hit: int


class Router:
    """The prefixes of all replicas and the measured speed of their steps. Plain arithmetic.

    Attributes:
        speed: learns from the steps of all replicas, which compute the same model on equal devices.
            A replica that falls behind shows it by its load.
    """

    def __init__(self, replicas: int) -> None:
        self.speed = StepSpeed()
        self._indexes = [PrefixIndex() for _ in range(replicas)]
        # Prompt tokens that each replica was sent; the least of these breaks ties.
        self._sent = [0] * replicas

    def resize(self, replica: int, blocks: int) -> None:
        """Sets the number of blocks that a replica's prefix cache holds."""
        self._indexes[replica].resize(blocks)

    def forget(self, replica: int) -> None:
        """Forgets the prefixes of a replica whose engine has ended."""
        self._indexes[replica].clear()

    def route(self, request: Submit, output: float, loads: Sequence[ReplicaLoad]) -> ChosenReplica:
        """Chooses one of the replicas of ``loads``, of which there is at least one, and notes it.

        Args:
            request: its ``resumed`` choices count as running ones.
            output: expected output tokens of each choice.
        """
        hashes = block_hashes(request) if _uses_prefixes(request) else []
        costs = self.speed.fit()
        choices = len(request.resumed) or request.n
        hits = {load.replica: self._indexes[load.replica].match(hashes) for load in loads}

        def rank(load: ReplicaLoad) -> tuple[float, int, int, int, int, int]:
            hit, sent = hits[load.replica], self._sent[load.replica]
            seconds = _seconds(costs, load, len(request.prompt) - hit, choices, output)
            return seconds, -hit, load.prompt, load.choices, sent, load.replica

        chosen = min(loads, key=rank).replica
        self._indexes[chosen].add(hashes)
        self._sent[chosen] += len(request.prompt)
        return ChosenReplica(chosen, hits[chosen])

    def extend(self, replica: int, request: Submit, output: Sequence[int]) -> None:
        """Notes that a replica has computed this output, too: a chat's next prompt contains it."""
        if output and _uses_prefixes(request):
            whole = msgspec.structs.replace(request, prompt=[*request.prompt, *output])
            self._indexes[replica].add(block_hashes(whole))


def _uses_prefixes(request: Submit) -> bool:
    return not request.replay and request.prompt_logprobs is None and request.pooling is None


def _seconds(
    costs: StepCosts, load: ReplicaLoad, missing: int, choices: int, output: float
) -> float:
    """The estimate of the module's docstring."""
    prefill = costs.prompt * (load.prompt + missing * (2 + min(load.choices, load.rows)))
    slower = 2 * costs.row * min(load.output, load.choices * output) / costs.gain
    beyond = max(0, load.choices + choices - load.rows)
    return prefill + slower + beyond / load.rows * output / costs.gain * costs.step(load.rows)
