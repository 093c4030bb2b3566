"""The null model's code, which is copied into its folder: a llama that can sleep in each step.

Sleeping leaves the CPU to other processes, as waiting for an accelerator does.
"""

# NOTE: no ``from __future__ import annotations`` here. mlx-lm does not register this module in
# sys.modules, where dataclasses would look up annotations that are strings.
import time
from dataclasses import dataclass
from typing import Any

from mlx_lm.models import llama


@dataclass
class ModelArgs(llama.ModelArgs):  # type: ignore[misc]
    """Llama's arguments, and the seconds that each call sleeps."""

    step_seconds: float = 0.0


class Model(llama.Model):  # type: ignore[misc]
    """A llama; ``__module__`` keeps the optimizations that are selected by a model's module."""

    __module__ = llama.__name__

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self._step_seconds = args.step_seconds

    def __call__(self, *args: Any, **options: Any) -> Any:
        time.sleep(self._step_seconds)
        return super().__call__(*args, **options)
