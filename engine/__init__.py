"""The engine turns the scheduler's plans into tokens; it owns MLX, the model and the caches.

``core`` runs the steps, ``client`` starts an engine (in a child process or on a thread) and
streams its tokens, ``messages`` are what crosses between the two. Public face: ``config``,
``errors``, ``messages`` and ``client``. Only those run in the API process, together with ``hub``,
``logs`` and ``workers``; everything else runs in the engine process. Must not import the API.
"""
