"""Tables with fewer rows than tokens are found at the start: tokens index them unchecked."""

from __future__ import annotations

import mlx.core as mx
import pytest
from conformance.configs import model_names, reason_not_applicable
from conformance.weights import tiny_model

from chairlift.cache.kinds import make_batch
from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.model.adapters import adapt
from chairlift.engine.model.trials import token_tables
from chairlift.engine.model.trials.probe import probe

SERVED = [name for name in model_names() if reason_not_applicable(name) is None]


@pytest.mark.parametrize("name", SERVED)
def test_every_model_has_a_table_of_tokens(name: str) -> None:
    model = tiny_model(name)
    adapt(model)
    classes = [type(part) for part in model.modules()]
    batch = make_batch(model, None)
    batch.join(columns=4)
    with batch.step(1), token_tables.watched(model) as rows:
        width = model(mx.zeros((1, 1), mx.int32), cache=batch.layers).shape[-1]
    assert rows
    assert token_tables.too_small(rows, width) is None
    assert [type(part) for part in model.modules()] == classes


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("gemma4_text", "model.embed_tokens_per_layer"),
        ("mixtral", "model.embed_tokens"),
        ("mamba2", "backbone.embeddings"),
    ],
)
def test_a_table_of_few_tokens_is_refused(name: str, table: str) -> None:
    model = tiny_model(name)
    adapt(model)
    layer = dict(model.named_modules())[table]
    layer.weight = layer.weight[:-1]
    rows = layer.weight.shape[0]
    with pytest.raises(UnsupportedModel, match=f"{table} has {rows} rows.* {rows + 1} tokens"):
        probe(model, name)
