"""Proposes the next tokens of rows, which the model verifies several at a time.

Public face: ``speculator.Speculator``. Runs in the engine process. Must not import the
engine's core or the API.
"""
