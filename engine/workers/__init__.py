"""Worker processes for work that a client can make expensive and that must be killable.

A thread does not help against native code that blocks the interpreter (a regular expression, the
validation of a body) or overflows the stack. ``Workers`` runs a function in a process with limits
on CPU time, memory and stack, and reports which limit a job exceeded. Public face: ``pool.Workers``
and ``job.Job``. ``child`` is the worker process's main module; the other modules run in the process
that starts workers. Must not import MLX.
"""
