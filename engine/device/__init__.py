"""The machine that the engine runs on: its default settings, its memory, MLX's backend.

``profile.current`` gives the ``DeviceProfile`` of MLX's default device (CPU, CUDA or Metal),
``memory`` divides what is free, ``limits.build_limits`` makes the scheduler's limits of both, and
``backend`` imports MLX or explains why that fails. Runs in the engine process; ``backend``,
``open_files``, ``profile``, ``limits`` and ``memory`` also in the command line's. Of the engine it
imports only ``config``, ``errors`` and ``messages``.
"""
