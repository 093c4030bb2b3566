"""Every model file of mlx-lm, tiny and random, in a Chairlift batch and alone: the same logits?

A schedule says who joins when and in which chunks; a check runs it twice, once in a batch and once
alone through mlx-lm's own caches; the report is the table of what differs.
"""
