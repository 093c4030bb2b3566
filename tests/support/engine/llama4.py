"""A tiny llama4, whose attention is chunked."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.overrides import OVERRIDES, Text
from conformance.weights import tiny_model

from chairlift.cache.kinds import layer_kinds
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.model.adapters import adapt

CHUNK = 8


CHUNKED = LayerKind(CHUNK, chunked=True)


def _llama4(seed: int = 5, **changes: Any) -> Any:
    """Chunks of 8 in three layers of four, queries scaled by position in the fourth."""
    usual = OVERRIDES["llama4"]["text_config"]
    with pytest.MonkeyPatch.context() as patch:
        text = Text(usual.module, usual.args, {**usual.values, **changes})
        patch.setitem(OVERRIDES, "llama4", {"text_config": text})
        model = tiny_model("llama4", seed)
    adapt(model)
    assert [kind for kind in layer_kinds(model) if kind == CHUNKED] == [CHUNKED] * 3
    return model
