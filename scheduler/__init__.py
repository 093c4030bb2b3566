"""Tokens computed catch up with tokens wanted.

A sequence has tokens wanted (its prompt, and every token sampled so far) and tokens computed (those
whose keys and values are in a cache). Each step lets the first catch up with the second; a sequence
whose last wanted token is computed gains one more. That is prefill, decode and starting over after
a preemption, all at once. Plain Python over plain data: no tensors, no HTTP.

Its public face is ``Scheduler``, ``Plan``, ``Limits`` and ``Sequence``. It runs in the engine
process, and must not import MLX, the engine or the API.

``simulate`` and what it alone uses (``simulation``, ``budget``, ``machine``, ``trace``,
``traffic``, ``measurements``, ``report``) serve requests without a model.
"""
