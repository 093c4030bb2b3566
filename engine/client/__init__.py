"""The API process's side of the engine: submits requests and streams their tokens.

Public face: the protocol ``interface.EngineClient``, ``factory.make_client``, and the
implementations ``process_client.ProcessClient`` (a supervised child process),
``replicas.ReplicaClient`` (several of them) and ``local.LocalClient`` (a thread, for tests). Runs
in the API process. Must not import MLX or the caches at the top; ``LocalClient`` loads the core
only when it starts.
"""
