"""Chairlift: a continuous-batching LLM serving engine on MLX.

The packages are the checkout's top-level folders; the symbolic links beside this file give them the
``chairlift.`` prefix that installers, type checkers and editors expect.
"""
