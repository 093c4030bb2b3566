"""Fault scenarios: each module attacks or overloads a real server and checks how it copes.

``python -m chairlift.loadtest.faults SCENARIO`` runs one; ``scenario`` defines the interface, and
``server`` starts the server as a child process. The package runs in the client's process and must
not import MLX or the cache, and of the engine only its default model and ``hub.source``.
"""
