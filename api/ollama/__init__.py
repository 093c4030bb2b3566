"""Ollama's API (/api/chat, /api/generate, /api/embed, ...): converts its requests and replies.

``handlers`` and ``models`` are the entry points. ``request`` validates the client's request, and
``dialogue`` converts it to a chat request or a completion. ``formatter`` builds the reply and its
stream of JSON lines from ``replies``, and ``errors`` has Ollama's error format. The package runs in
the API process and must not import MLX, transformers, the cache or the scheduler.
"""
