"""Loads vision models, with mlx-vlm."""

from __future__ import annotations

from pathlib import Path

from chairlift.engine.model.vision.model import VisionModel


def load_vision_model(path: Path, model_type: str) -> VisionModel:
    """Loads a directory's model. Its weights are read when they are first used.

    Args:
        model_type: the result of ``vision_type``.

    Raises:
        Exception: of any type; mlx-vlm cannot load it.
    """
    # It needs the extra "vision", and takes a second.
    from mlx_vlm.utils import load_model

    model = load_model(path, lazy=True)
    if hasattr(model, "disable_talker"):  # Qwen3-Omni's part that speaks, which no request uses
        model.disable_talker()
    return VisionModel(model, model_type)
