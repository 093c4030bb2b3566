"""Sampling on a CPU, by compiled functions and NumPy.

MLX's CPU backend computes exponential functions, maxima and partitions on one thread, several times
as slowly, and each of its operations reads and writes all logits. Here, penalties and biases change
only the logits of their tokens, and all threads read the logits two or three times.
"""
