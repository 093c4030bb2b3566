"""The null model's code, which is copied into its folder: a llama that can take its time.

It sleeps as a process does that waits for an accelerator, and leaves the CPU to the others.
"""

# NOTE: mlx-lm does not register this module, where dataclasses would look annotations up that are
# strings. Hence no annotations from __future__.
import time
from dataclasses import dataclass
from typing import Any

from mlx_lm.models import llama


@dataclass
class ModelArgs(llama.ModelArgs):  # type: ignore[misc]
    """Llama's, and the seconds that a call sleeps."""

    step_seconds: float = 0.0


class Model(llama.Model):  # type: ignore[misc]
    """The name tells whose attention and activations it computes with."""

    __module__ = llama.__name__

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self._step_seconds = args.step_seconds

    def __call__(self, *args: Any, **options: Any) -> Any:
        time.sleep(self._step_seconds)
        return super().__call__(*args, **options)
