"""The machine that the engine runs on: its defaults, its memory, its own kernels, its diagnosis.

``profile.current`` gives the ``DeviceProfile`` of MLX's default device (CPU, CUDA or Metal),
``memory`` divides what is free, ``limits.build_limits`` makes the scheduler's limits of both,
``acceleration.accelerate`` gives a loaded model faster kernels, and ``diagnosis.diagnose`` is
behind ``chairlift doctor``. Runs in the engine process, the last also in the command line's.
Imports nothing from the API, and neither the engine's core nor its client.
"""
