"""The engine's child process: how it is spawned, connected, watched and ended.

``child`` and the reading half of ``blackbox`` run in the API process, ``engine_process`` and the
writing half in the child. ``rank_process`` and ``follower`` are a further rank of an engine that
has several. ``diagnosis`` is behind ``chairlift doctor``: what an engine process would find on this
machine. Public face: ``child.EngineProcess``, ``diagnosis.diagnose``. No module here may import MLX
before ``blas.load_fast_blas`` has loaded the library that MLX is to use.
"""
