"""Prompt tokens that have to be in one chunk."""

from __future__ import annotations

import random

import pytest
from support.scheduler.loop import EngineLoop, make_limits, make_sequence


@pytest.mark.parametrize("seed", range(5))
def test_no_chunk_ends_inside(seed: int) -> None:
    draw = random.Random(seed)
    loop = EngineLoop(make_limits())
    limits = loop.scheduler.limits
    longest = limits.max_step_tokens - limits.max_rows
    sequences = [make_sequence(str(number), draw.randrange(40, 150), 5) for number in range(8)]
    for sequence in sequences:
        start = draw.randrange(30)
        length = draw.randrange(2, min(longest, sequence.prompt_tokens - start) + 1)
        sequence.uncut = (range(start, start + length),)
        loop.scheduler.add(sequence)
    ends = {sequence: [0] for sequence in sequences}
    while not loop.scheduler.idle or loop.in_flight:
        for sequence, tokens in loop.step().chunks.items():
            ends[sequence].append(ends[sequence][-1] + tokens)
    assert len(loop.finished) == len(sequences)
    for sequence in sequences:
        assert ends[sequence][-1] >= sequence.prompt_tokens
        (whole,) = sequence.uncut
        assert not [end for end in ends[sequence] if whole.start < end < whole.stop]
