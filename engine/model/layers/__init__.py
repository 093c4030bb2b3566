"""Layers of model files, computed in a faster way that gives the same results.

``install`` replaces what a model's layers call: recurrent rules of which mlx-lm computes one token
after the other where it has no Metal, the gated delta rule (``gated_delta``) and those with decays
(``decayed``); short convolutions (``depthwise``); products with a matrix for each head
(``head_products``). Runs in the engine process. Must not import the engine's core or client, the
scheduler or the API.
"""
