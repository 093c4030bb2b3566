"""Attention on the CPU in NumPy and compiled functions.

``blocks`` computes attention of any number of tokens, ``layer`` whole attention layers of few
tokens, and ``heads`` the products of multi-head latent attention. Runs in the engine process.
"""
