"""When sequences join, how long their prompts are, and their chunks: drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from conformance.values import VOCAB, WINDOW


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: its prompt, and when it is in the batch.

    Args:
        prompt: the prompt's tokens.
        chunks: tokens of each prefill step. Their sum is the prompt's length, or one less: then the
            decode batch computes the prompt's last token.
        decodes: steps in the decode batch.
        join: the step of the decode batch before which it joins.
        columns: the length that is announced when it joins.
    """

    prompt: list[int]
    chunks: list[int]
    decodes: int
    join: int
    columns: int

    @property
    def prefilled(self) -> int:
        """Tokens of the prompt that are prefilled."""
        return sum(self.chunks)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The sequences, and the groups that are prefilled together, with padding."""

    sequences: list[Sequence]
    prefills: list[list[int]]


def random_schedule(seed: int, *, pads: bool) -> Schedule:
    """Six sequences of 1 to about 3 windows; two share a prefill where the batch can pad."""
    draw = random.Random(seed)
    lengths = [
        1,
        2,
        draw.randrange(3, WINDOW),
        draw.randrange(WINDOW, 2 * WINDOW),
        draw.randrange(2 * WINDOW, 3 * WINDOW),
        3 * WINDOW + draw.randrange(4),
    ]
    # The shortest joins without a state, the next with one token: less than a convolution's tail.
    held_back = [1, 1, *(draw.randrange(2) for _ in lengths[2:])]
    together = draw.sample(range(2, len(lengths)), 2) if pads else []
    width = draw.choice([5, WINDOW + 3])
    joins = draw.sample([0, *range(2, 10, 2), 5], len(lengths))
    sequences = []
    for number, length in enumerate(lengths):
        prefilled = length - held_back[number]
        chunks = (
            _equal_chunks(prefilled, width)
            if number in together
            else _random_chunks(draw, prefilled)
        )
        sequences.append(
            Sequence(
                prompt=[draw.randrange(VOCAB) for _ in range(length)],
                chunks=chunks,
                decodes=draw.randrange(3, WINDOW + 6),
                join=joins[number],
                columns=draw.choice([0, length + 20]),
            )
        )
    alone = [[number] for number in range(len(lengths)) if number not in together]
    return Schedule(sequences, alone + ([together] if together else []))


def _random_chunks(draw: random.Random, total: int) -> list[int]:
    """Chunks shorter and longer than the window."""
    chunks = []
    while total:
        chunk = min(total, draw.choice([1, 3, 7, WINDOW, WINDOW + 8, 100]))
        chunks.append(chunk)
        total -= chunk
    return chunks


def _equal_chunks(total: int, width: int) -> list[int]:
    return [min(width, total - start) for start in range(0, total, width)]
