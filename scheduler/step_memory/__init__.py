"""The memory of one step: which rows and prompts fit together, in columns or in pages.

Its public face is ``plan_memory`` with its ``MemoryPlan``. As the rest of the scheduler it runs in
the engine process, and must not import MLX, the engine or the API.
"""
