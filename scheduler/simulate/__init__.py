"""``python -m chairlift.scheduler.simulate``: runs the scheduler without a model.

The real scheduler serves a trace or generated requests on a simulated clock, with step times from a
cost model. It runs in a process of its own, and must not import MLX, the engine or the API.
"""
