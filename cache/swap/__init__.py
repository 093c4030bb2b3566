"""Swap space for the states of preempted rows: host memory first, then disk.

Public face: ``swap.Swap`` and ``files.SwapFiles``. Runs in the engine process, with one thread for
the files that must not use MLX. Must not import the engine or the scheduler.
"""
