"""The load test: sends a workload to an OpenAI-compatible server and times every chunk of a reply.

It can also check that greedy replies do not depend on the batch.

``bench`` is the command ``chairlift bench``, ``data`` builds workloads, ``plots`` draws the report,
``servers`` starts servers to measure, and ``faults`` attacks a server. The modules here are
benchmarks and comparisons, each run with ``python -m``. The client side must not import MLX, the
engine or the cache, and of the API only its argument parser and event parser; only the named
benchmarks that run an engine in their own process do.
"""
