"""Several models behind one server: which are loaded, who waits for one, what memory each gets.

Every model has an engine of its own. A request takes a ``Lease`` of the model that it names; a
model with a lease or an unfinished request is never unloaded. Public face: ``pool.ModelPool``
decides what is loaded, ``served_model.ServedModel`` is a loaded model, ``making.make_pool`` finds
the files and divides the memory by the rule of ``budget``. Runs in the API process. Imports no MLX
at the top.
"""
