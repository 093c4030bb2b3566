"""Tensor parallelism: one model on several devices, each of which computes its part of every layer.

The engine process is rank 0. It starts a process for each other rank, and all of them run the same
steps: ``ranks`` joins them through MLX's distributed layer, and ``shard`` keeps a rank's part of a
model. Rank 0 alone decides. ``journal`` records its decisions, and ``followers`` sends them to the
other ranks before each step; ``process.rank_process`` replays them. Runs in the engine's processes.
"""
