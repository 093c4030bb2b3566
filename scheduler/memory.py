"""KV memory as a single sequence sees it: the interface of ``columns`` and ``pages``."""

from __future__ import annotations

from typing import Protocol


class Memory(Protocol):
    """The KV memory of an engine, as one sequence sees it that has all of it to itself."""

    @property
    def max_context(self) -> int:
        """The maximum tokens, prompt and output, of a sequence that has all memory to itself.

        Without a full-attention layer, memory sets no limit and this number is huge.
        """

    def bytes_alone(self, tokens: int) -> int:
        """Bytes that a sequence of ``tokens`` prompt and output tokens needs on an idle engine.

        Any of them may be the prompt's, or all. If it is preempted near its end, all its tokens but
        the last are prefilled again.
        """

    def shortage(self, tokens: int) -> str:
        """The text for a refused client: what ``tokens`` tokens need, and what there is."""

    def prompt_bytes(self, num_tokens: int, computed: int) -> int:
        """Bytes of a prompt of ``num_tokens`` tokens in prefill, ``computed`` of them cached."""

    def min_prompt_bytes(self, num_tokens: int) -> int:
        """A lower bound of ``prompt_bytes`` for any number of cached tokens."""

    def fits_together(self, rows: int, num_tokens: int) -> bool:
        """Whether all choices of a prompt fit an idle engine, with a few tokens to spare."""
