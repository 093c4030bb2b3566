"""Reads GGUF files: structure, configuration, tokenizer, and weights for mlx-lm's classes.

Public face: ``file.GGUFFile``, ``model.build_model``, ``tokenizer.load_gguf_tokenizer``. ``file``
and ``config`` know no MLX and are read in any process; ``model`` runs in the engine process. Must
not import the engine's core or the caches.
"""
