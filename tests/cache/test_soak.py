"""Hundreds of random operations on batches of every kind; see ``support.engine.soak``."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.engine.soak import Soak
from support.models import default_model_path
from support.tiny import TinyKind, tiny_model

from chairlift.engine.hub.source import ModelSource
from chairlift.engine.model.loader import load_model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_five_hundred_random_operations_give_the_solo_tokens(kind: TinyKind) -> None:
    drawn = random.Random(3)
    prompts = [[drawn.randrange(3, 250) for _ in range(n)] for n in (1, 3, 15, 17, 40, 90)]
    soak = Soak(tiny_model(kind, seed=5), prompts, 24, seed=3)
    soak.run(500)
    assert min(soak.done[name] for name in ("step", "join", "leave", "keep", "restore")) > 20
    assert soak.done["rewind"] > 5
    # A full cache always rewinds; a window that has wrapped and a recurrent state refuse.
    assert (soak.refused > 0) == (kind != "llama")


@pytest.mark.system
@pytest.mark.parametrize("path", [None, *filter(None, [os.environ.get("SOAK_MODEL")])])
def test_random_operations_on_a_real_model(path: str | None) -> None:
    """The default model, and the GGUF file that SOAK_MODEL names."""
    source = ModelSource("soak", "gguf", Path(path) if path else default_model_path())
    model = load_model(source, "float32").model
    drawn = random.Random(4)
    lengths = [3, 40, 300, 515, 700] if path else [3, 20, 50]
    prompts = [[drawn.randrange(100, 30_000) for _ in range(n)] for n in lengths]
    soak = Soak(model, prompts, 10, seed=14)
    soak.run(50)
    print(lengths, soak.done, soak.refused, "rewinds refused")
    assert min(soak.done.values()) > 1
