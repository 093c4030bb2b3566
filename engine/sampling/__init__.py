"""Sampling: one token for every row at once, on the device, each by its own parameters.

Public face: ``sampler.Sampler``. Runs in the engine process. Must not import the engine's core, the
caches or the API.
"""
