"""Sampling: chooses a token for all rows at once, on the device, by each row's parameters.

Public face: ``sampler.Sampler``. Runs in the engine process. Must not import the engine's core, the
caches or the API.
"""
