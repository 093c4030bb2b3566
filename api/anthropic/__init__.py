"""Anthropic's Messages API (/v1/messages): converts blocks to a chat request, and output to blocks.

``handlers`` is the entry point. ``request`` and ``blocks`` validate what a client sends;
``dialogue`` and ``history`` make a chat request of it. ``output`` and ``shape`` build the reply and
its stream from ``replies``, and ``errors`` formats errors as Anthropic does. The package runs in
the API process and must not import MLX, transformers, the cache or the scheduler.
"""
