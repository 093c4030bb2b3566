"""Counts an image's embeddings without a model's weights. Runs in a worker process."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chairlift.engine.messages import Array, PromptImage
from chairlift.engine.model.vision.families import family_of
from chairlift.engine.model.vision.image_inputs import ImageInputs

# The parts of a config that have classes of their own.
_PARTS = ["text", "vision", "perceiver", "projector", "audio"]


class EmbeddingCounter:
    """Counts with mlx-vlm's own code: it builds the graph of an image's embeddings, unevaluated.

    Args:
        model: mlx-vlm's model. Its weights are never computed, so they take no memory.
    """

    def __init__(self, model: Any, model_type: str) -> None:
        self._family = family_of(model_type)
        self._inputs = ImageInputs(model, self._family)

    def count(self, arrays: Mapping[str, Array], tokens: int) -> int:
        """The number of embeddings of an image for which the processor has ``tokens`` tokens.

        Raises:
            Exception: of any type; the model cannot take these arrays.
        """
        image = PromptImage(b"", list(range(tokens)), dict(arrays))
        embedded = self._inputs.embedded(image, [0] * tokens)
        length: int = embedded.inputs_embeds.shape[1]
        return length - self._family.lead


def embedding_counter(folder: str, model_type: str) -> EmbeddingCounter:
    """A counter for a model in a folder.

    Raises:
        Exception: of any type; the config lacks something.
    """
    from mlx_vlm.utils import update_module_configs

    package = importlib.import_module(f"mlx_vlm.models.{model_type}")
    config = json.loads((Path(folder) / "config.json").read_bytes())
    # As mlx-vlm does before it parses a config.
    config.setdefault("text_config", config.pop("llm_config", {}))
    config.setdefault("vision_config", {})
    config.setdefault("audio_config", {})
    parsed = package.ModelConfig.from_dict(config)
    model = package.Model(update_module_configs(parsed, package, config, _PARTS))
    model.eval()  # in training, some towers refuse a single image
    return EmbeddingCounter(model, model_type)
