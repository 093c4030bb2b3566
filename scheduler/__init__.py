"""Decides what each step computes: the computed tokens of a sequence catch up with all its tokens.

A sequence has ``num_tokens`` (its prompt and every token sampled so far) and ``computed`` (tokens
whose keys and values are in a cache). Each step lets the second catch up with the first; when the
last token is computed, the sequence gains one more. This one rule covers prefill, decode and
recomputing after a preemption. The package is plain Python over plain data: no tensors, no HTTP.

Its public face is ``Scheduler``, ``Plan``, ``Limits`` and ``Sequence``. It runs in the engine
process, and must not import MLX, the engine or the API.

``simulate`` is a command that runs the scheduler without a model, on a simulated clock.
"""
