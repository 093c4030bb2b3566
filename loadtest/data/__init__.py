"""Workloads of the load test: requests and their arrival times.

Prompts come from random words (``workload``, ``repetition``), files (``custom``, ``sharegpt``) or a
trace (``replay``); ``bench.dataset`` combines them as a ``BenchConfig`` describes. The same seed
gives the same workload. It runs in the client's process and must not import MLX, the engine or the
API.
"""
