"""A tiny llama that aborts its process when a prompt contains certain tokens."""

from __future__ import annotations

import json
from pathlib import Path

from support.tiny import tiny_model_dir

# No random prompt or output has this token so often in one step.
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
    """Writes an mlx-lm directory with model code, which a server has to trust."""
    path = tiny_model_dir(folder, "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_file": "poisonable.py"}))
    (path / "poisonable.py").write_text(_CODE)
    return path
