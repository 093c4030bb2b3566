"""The model calls of steps over pages.

Public face: ``forward.PagedForward``, which calls a model once for all rows and prompts of a step.
``compiled`` compiles calls whose shapes recur, ``inputs`` has the numbers of a call. Runs in the
engine process. Must not import the engine's core or client, the scheduler or the API.
"""
