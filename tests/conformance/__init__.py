"""Compares the logits of every mlx-lm model file, tiny and random, in our batch and alone.

A schedule says when each sequence joins and in which chunks its prompt is computed. A check runs it
in a batch and, sequence by sequence, through mlx-lm's own caches. The report lists the differences.
"""
