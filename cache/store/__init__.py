"""Prefixes on disk: nodes evicted from the prefix tree, one safetensors file each.

Public face: ``store.PrefixStore``. Runs in the engine process, with one writer and one reader
thread; these threads handle plain memory and must not use MLX. Must not import the engine.
"""
