"""Servers that the load test starts itself: Chairlift, its peers, and Chairlift with a null model.

``ChildServer`` runs one as a child process and waits until it is healthy; ``peers`` has the
commands, ``procfs`` reads CPU time and memory. Only ``null_model``, ``null_code`` and
``random_model`` import MLX: they run in other processes than the client.
"""
