"""The engine core: it serves requests with one model, one step at a time.

A step is planned by the scheduler, built as a graph, launched, and read while the next one runs.
``start.start_core`` builds an ``EngineCore``, and ``loop.run`` turns it. ``pipeline`` holds what is
in flight, ``outputs`` reads it, ``background`` is what other threads do meanwhile. This runs in the
engine process. It must not import the API.
"""
