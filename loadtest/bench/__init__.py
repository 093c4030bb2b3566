"""The command ``chairlift bench``: sends a load to a server and reports latency and throughput.

``cli.run`` runs it from parsed flags, ``run.perform`` from a ``BenchConfig``; the result is a
``BenchRun``, which ``result_file`` saves. ``client`` sends requests and times replies, ``load``
paces them, ``metrics`` computes the numbers, ``crosscheck`` compares them with the server's
metrics, and ``verify`` checks that greedy replies are independent of the batch. It runs in the
client's process and must not import MLX, the engine or the cache, and of the API only
``http.event_parser``.
"""
