"""Logging of both processes: set-up, a writer that never blocks, redacted tracebacks.

Public face: ``setup.set_up_logs`` and ``redacted_traceback.redacted_traceback``. Runs in the API
and in the engine process. Must not import anything else of Chairlift.
"""
