"""Packed steps over columns: one model call computes the tokens of several batches.

``step`` lays out the tokens and their attention. ``split`` is for layers that mix tokens in other
ways, as recurrent layers do; steps over pages use it as well. It runs in the engine's process, and
imports neither the engine nor the scheduler.
"""
