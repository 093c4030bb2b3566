"""A tiny llama that brings its process down when it is fed a certain prompt."""

from __future__ import annotations

import json
from pathlib import Path

from support.tiny import tiny_model_dir

# No random prompt or output has so many of them in one step.
POISON = [250] * 24
_CODE = f"""
import os
import resource

import mlx.core as mx
from mlx_lm.models import llama

ModelArgs = llama.ModelArgs
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Model(llama.Model):
    __module__ = llama.__name__

    def __call__(self, inputs, *args, **options):
        if mx.sum(inputs == {POISON[0]}).item() >= {len(POISON)}:
            os.abort()
        return super().__call__(inputs, *args, **options)
"""


def poisonable_model_dir(folder: Path) -> Path:
    """An mlx-lm directory with code of its own, which has to be trusted."""
    path = tiny_model_dir(folder, "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_file": "poisonable.py"}))
    (path / "poisonable.py").write_text(_CODE)
    return path
