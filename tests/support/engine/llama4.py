"""A tiny llama4, a model with chunked attention."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.overrides import OVERRIDES, Text
from conformance.weights import tiny_model

from chairlift.cache.kinds import make_batch
from chairlift.cache.snapshot import LayerKind
from chairlift.engine.model.adapters import adapt

CHUNK = 8
CHUNKED = LayerKind(CHUNK, chunked=True)


def tiny_llama4(seed: int = 5, **changes: Any) -> Any:
    """Three layers attend within chunks of 8 tokens; the fourth scales its queries by position."""
    default = OVERRIDES["llama4"]["text_config"]
    with pytest.MonkeyPatch.context() as patch:
        text = Text(default.module, default.args, {**default.values, **changes})
        patch.setitem(OVERRIDES, "llama4", {"text_config": text})
        model = tiny_model("llama4", seed)
    adapt(model)
    assert [kind for kind in make_batch(model).kinds if kind == CHUNKED] == [CHUNKED] * 3
    return model
