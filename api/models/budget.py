"""Divides one device's memory among the engines of several models. Plain arithmetic, no MLX.

The rule: a model's *fixed* memory is its weights, the working memory of a step, and its KV and
prefix cache where flags give their sizes. As many models are meant to be loaded at once as the
largest fixed sizes allow, with at least ``KV_SHARE`` of the budget left for caches. They share
equally what they leave: a model without ``kv-memory`` gets its fixed memory and one such part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chairlift.engine.errors import ModelError

# At least this share of the budget is left for caches whose size no flag gives. Weights that fill
# the memory to the brim would leave room for a handful of tokens.
KV_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that one model needs, in bytes.

    Attributes:
        name: the model's id, for errors.
        weights: its weights in the engine's memory.
        working: the memory of a step and of MLX's cache of buffers.
        caches: its KV and prefix cache; None: they get a part of what the models leave.
        is_eager: whether it is loaded at the start.
    """

    name: str
    weights: int
    working: int
    caches: int | None
    is_eager: bool

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the other models."""
        return self.weights + self.working + (self.caches or 0)


def divide(budget: int, needs: Sequence[Need]) -> Mapping[str, int]:
    """The bytes of each model's engine, by name.

    Raises:
        ModelError: a model does not fit the budget, or those that are loaded at the start do not
            fit together. The message is one line.
    """
    largest = sorted((need.fixed for need in needs), reverse=True)
    spare = 0 if all(need.caches is not None for need in needs) else int(budget * KV_SHARE)
    together, used = 0, 0
    for fixed in largest:
        if used + fixed > budget - spare:
            break
        used += fixed
        together += 1
    if not together:
        worst = max(needs, key=lambda need: need.fixed)
        raise ModelError(
            f"the model {worst.name} needs {_gb(worst.fixed)} without its caches"
            f"{f' and {_gb(spare)} for them' if spare else ''}, and the models of this server may "
            f"use {_gb(budget)} together (--models-memory)"
        )
    part = (budget - used) // together
    parts = {need.name: need.fixed + (part if need.caches is None else 0) for need in needs}
    eager = [need.name for need in needs if need.is_eager]
    if (total := sum(parts[name] for name in eager)) > budget:
        raise ModelError(
            f"the models {', '.join(eager)} are to be loaded at the start and need {_gb(total)} "
            f"together, and may use {_gb(budget)} (--models-memory); load some with --load lazy"
        )
    return parts


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
