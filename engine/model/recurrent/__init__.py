"""Recurrent layers, computed in blocks of tokens where mlx-lm computes one after the other.

``install`` replaces what a model's layers call: the gated delta rule (``gated_delta``), state space
models and linear attention with decays (``decayed``), and short convolutions (``depthwise``). On
Metal mlx-lm has kernels of its own, which stay. Runs in the engine process. Must not import the
engine's core or client, the scheduler or the API.
"""
