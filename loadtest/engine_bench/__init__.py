"""``python -m chairlift.loadtest.engine_bench``: compares the engine with mlx-lm's BatchGenerator.

It runs in one process without HTTP, with random weights for any of mlx-lm's architectures. It
measures a mixed load (tokens per second, gaps between decode steps, peak memory) and pure decode
steps at given numbers of rows. The lower bound that the device's memory bandwidth and arithmetic
set for each step is printed as "least". With ``--tensor-parallel-size`` the engine has a process
for each device, and each makes the weights of its own part only. With ``--server`` the mixed load
goes to ``chairlift serve`` over HTTP instead.
"""
