"""Paged KV caches: pools of equal pages, of which each sequence takes as many as it needs.

Runs in the engine process; ``page`` and ``budget`` are plain arithmetic without MLX, shared with
the scheduler. Must not import the engine, the API or the scheduler.
"""
