"""A first step with a model: can it run on our caches, and what does a token cost?"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from chairlift.cache.capacity import KVGeometry
from chairlift.cache.kinds import UnsupportedKind, make_batch
from chairlift.cache.quantized import Quantization
from chairlift.engine.errors import UnsupportedModel


def probe(
    model: Any, architecture: str, quantization: Quantization | None = None
) -> tuple[KVGeometry, int]:
    """Runs two rows of different length through a prefill and a decode step.

    Returns:
        What a token costs in the caches, and the vocabulary's size as the model's logits have it.

    Raises:
        UnsupportedModel: the model wants caches that cannot be batched yet, or its code does not
            run with them; the architecture is named.
    """
    try:
        prompts, batch = make_batch(model, quantization), make_batch(model, quantization)
        for _ in range(2):
            prompts.join(columns=4)
        with prompts.step(3, [3, 2] if prompts.pads else None):
            model(mx.zeros((2, 3), mx.int32), cache=prompts.layers)
        for row in range(2):
            batch.join(prompts.extract(row))
        with batch.step(1):
            logits = model(mx.zeros((2, 1), mx.int32), cache=batch.layers)
        mx.eval(logits)
        return batch.geometry(), int(logits.shape[-1])
    except UnsupportedKind as error:
        why = str(error)
    except Exception as error:  # a model's own code, which may raise anything
        why = f"its model file fails on batched caches ({type(error).__name__}: {error})"
    raise UnsupportedModel(f"the architecture {architecture} cannot be served: {why}")
