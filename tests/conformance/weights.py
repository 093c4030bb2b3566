"""Random weights that give distinct logits, and gates that are neither shut nor open."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from support.noise import noise

from conformance.configs import tiny_args

# Scale of a weight, times 1 / sqrt(fan in): so large that tokens depend on their context.
GAIN = 1.5


def tiny_model(name: str, seed: int = 0) -> Any:
    """A random instance of a model file in float32, evaluated; the same seed, the same weights."""
    module, args = tiny_args(name)
    mx.random.seed(seed)  # for parameters that a model draws itself
    model = module.Model(args)
    if getattr(args, "tie_word_embeddings", False):
        model.sanitize({})  # removes the output matrix, as for a checkpoint without one
    return randomize(model, seed)


def randomize(model: Any, seed: int) -> Any:
    """Gives a model random weights in float32, and evaluates them."""
    weights = []
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    for number, (path, old) in enumerate(parameters):
        weights.append((path, _random_like(path, old, seed, number)))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _random_like(path: str, old: mx.array, seed: int, number: int) -> mx.array:
    if not mx.issubdtype(old.dtype, mx.floating):
        return old
    drawn = noise(seed, number, old.shape)
    name = path.rsplit(".", 1)[-1]
    if old.ndim > 1 and (name.endswith("weight") or min(old.shape) > 1):
        fan_in = old[0].size if "conv" in path else old.shape[-1]
        return mx.multiply(drawn, GAIN / fan_in**0.5)
    # Norm weights, biases, decay rates: close to the model's initial values, but not equal.
    return mx.add(old.astype(mx.float32), (0.1 if name == "bias" else 0.2) * drawn)
