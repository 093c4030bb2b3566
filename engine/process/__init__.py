"""The engine's child process: how it is spawned, connected, watched and ended.

``child`` and the reading half of ``blackbox`` run in the API process, ``engine_process`` and the
writing half in the child. Public face: ``child.EngineProcess``. No module here may import MLX
before ``engine_process.main`` has loaded the BLAS library that MLX is to use.
"""
