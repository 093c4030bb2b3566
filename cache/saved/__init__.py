"""Snapshots as safetensors files, and the conversion between MLX arrays and plain memory.

Public face: ``nodes.SavedNode`` with its readers and writers, ``layers.pack`` and ``unpack``,
``promptfile.read_prompt_cache`` for mlx-lm's files. Runs in the engine process. Only ``pack`` and
``unpack`` use MLX, so files are read, checked and written on any thread. Must not import the
engine.
"""
