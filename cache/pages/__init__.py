"""Pages: parts of equal size of a KV cache, which sequences hold in any order.

Runs in the engine process and in the scheduler. Must not import MLX or the engine.
"""
