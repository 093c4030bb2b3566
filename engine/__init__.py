"""The engine turns the scheduler's plans into tokens; it owns MLX, the model and the caches.

``core`` runs the steps, ``client`` starts an engine (in a child process or on a thread) and
streams its tokens, ``messages`` are what crosses between the two. Public face: ``config``,
``errors``, ``messages`` and ``client``. Those run in the API process, together with ``hub``,
``logs``, ``workers``, and parts of ``grammar``, ``device``, ``process`` and ``model`` that load no
MLX; everything else runs in the engine process. Must not import the API.
"""
