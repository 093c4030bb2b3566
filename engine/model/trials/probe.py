"""Runs a first step with a model: checks that it works on batched caches, and measures its KV."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from chairlift.cache.capacity import KVGeometry
from chairlift.cache.kinds import UnsupportedKind, make_batch
from chairlift.cache.quantized import CannotQuantize, Storage
from chairlift.cache.saved.layers import LayerTemplate, template_of
from chairlift.engine.errors import UnsupportedModel
from chairlift.engine.model.trials import token_tables


class Probed(NamedTuple):
    """The results of the first step.

    Attributes:
        geometry: bytes of a token and of a row in the caches.
        vocabulary: the last dimension of the logits.
        layers: the form of each layer's cache.
    """

    geometry: KVGeometry
    vocabulary: int
    layers: list[LayerTemplate]


def probe(model: Any, architecture: str, storage: Storage | None = None) -> Probed:
    """Runs two rows of different length through a prefill and a decode step.

    Raises:
        UnsupportedModel: the model needs caches that cannot be batched or quantized, or its code
            fails with batched caches, or a table that tokens index has too few rows. The message
            names the architecture.
    """
    try:
        prompts, batch = make_batch(model, storage), make_batch(model, storage)
        for _ in range(2):
            prompts.join(columns=4)
        with prompts.step(3, [3, 2] if prompts.pads else None):
            model(mx.zeros((2, 3), mx.int32), cache=prompts.layers)
        for row in range(2):
            batch.join(prompts.extract(row))
        with batch.step(1), token_tables.watched(model) as rows:
            logits = model(mx.zeros((2, 1), mx.int32), cache=batch.layers)
        mx.eval(logits)
        vocabulary = int(logits.shape[-1])
        layers = template_of(batch.kinds, batch.extract(0))
        if (small := token_tables.too_small(rows, vocabulary)) is None:
            return Probed(batch.geometry(), vocabulary, layers)
        why = small
    except UnsupportedKind as error:
        why = str(error)
    except CannotQuantize as error:
        raise UnsupportedModel(
            f"the architecture {architecture} cannot be served with --kv-bits: {error}"
        ) from error
    except Exception as error:  # a model file may raise anything
        why = f"its model file fails on batched caches ({type(error).__name__}: {error})"
    raise UnsupportedModel(f"the architecture {architecture} cannot be served: {why}")
