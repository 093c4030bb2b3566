"""The records of the scheduler's fuzz: caches of prompts, and counts of events."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.scheduler.columns import PromptSize
from chairlift.scheduler.sequence import Sequence


@dataclass
class Cache:
    """The cache of a prompt that is being computed.

    Attributes:
        sequence: the prompt.
        size: columns and step that were reserved.
        nbytes: bytes that were reserved.
        tokens: tokens that are in it.
        regular: all chunks so far had a multiple of ``Limits.chunk_multiple`` tokens.
    """

    sequence: Sequence
    size: PromptSize
    nbytes: int
    tokens: int
    regular: bool = True


@dataclass
class Counts:
    """Counts of events over some seeds; the test checks that every event happened."""

    steps: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    alone: int = 0
    hits: int = 0
    resumed: int = 0
    followers: int = 0
    passed: int = 0
    bands: int = 0
    padded: int = 0
    shared: int = 0
    accepted: int = 0
