"""Batched KV caches: every row of a batch writes at one shared cursor that moves round a ring.

``ring`` is the buffer of one layer and its geometry, ``batch`` the rows of a whole model,
``kinds`` reads from a model which layers it wants, ``capacity`` is the arithmetic of sizes, which
the scheduler uses too and which therefore knows no MLX.
"""
