"""llama.cpp's routes: GET /props and /slots, POST /apply-template and /infill.

``status`` describes the server, and ``prompts`` has the routes that take a body. ``request`` and
``replies`` are their bodies. The package runs in the API process and must not import MLX,
transformers, the cache or the scheduler.
"""
