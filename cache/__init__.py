"""The KV caches of a batch, and where sequences keep their state outside it.

Each row of a batch writes at a cursor of its own, which moves round a ring: ``ring`` is one layer's
geometry, ``layer`` its buffers, ``batch`` the rows of a whole model, ``state`` a recurrent layer.
``kinds`` reads from a model which caches it needs, ``snapshot`` is one sequence's state on its own,
``pages`` has the caches of devices whose kernels read pages, and ``capacity`` is the arithmetic of
sizes, shared with the scheduler and therefore without MLX. Public face: ``make_batch``,
``BatchCache``, ``Snapshot``. Runs in the engine process. Must not import the engine, the API or the
scheduler.
"""
