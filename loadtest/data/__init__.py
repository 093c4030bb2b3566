"""Workloads of the load test: requests and their arrival times.

``build_workload`` builds the one that a ``BenchConfig`` describes, from random words (``workload``,
``repetition``), files (``custom``, ``sharegpt``) or a trace (``replay``). The same seed gives the
same workload. It runs in the client's process and must not import MLX, the engine or the API.
"""
