"""Prometheus metrics as data: ``table`` lists every metric, ``recorder`` updates them.

The recorder takes one ``StepStats`` an engine step and one call an HTTP event; ``quantiles``
estimates percentiles. Public face: ``recorder.Recorder``. Runs in the API process.
It may import ``engine.messages`` and nothing else of Chairlift, and never MLX.
"""
