"""The API process's side of the engine: submits requests and streams their tokens.

Public face: the protocol ``interface.EngineClient`` and its implementations
``process_client.ProcessClient`` (a supervised child process) and ``local.LocalClient`` (a thread,
for tests). Runs in the API process. Must not import MLX or the caches; ``LocalClient`` loads the
core only when it starts.
"""
