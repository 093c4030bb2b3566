"""The engine core: serves requests with one model, one step at a time.

A step is planned by the scheduler, built as a graph, launched, and read while the next step runs.
``start.start_core`` builds an ``EngineCore``, and ``loop.run`` runs it. ``pipeline`` has the steps
in flight, ``outputs`` reads them, and ``background`` is the work of other threads. Runs in the
engine process. Must not import the API.
"""
