"""Tries a model, and faster replacements of its parts, before they are used.

``probe`` runs a first step with a model and measures its caches, and ``token_tables`` checks that
every token has a row. ``trial`` compares a replacement with the original; ``expert_choices`` keeps
rounding from sending tokens to other experts meanwhile. Runs in the engine process. Must not import
the engine's core or client, the scheduler or the API.
"""
