"""Compares faster replacements of parts of a model with the original, before they are used.

``trial`` runs and compares both; ``expert_choices`` keeps rounding from sending tokens to other
experts meanwhile. Runs in the engine process. Must not import the engine's core or client, the
scheduler or the API.
"""
