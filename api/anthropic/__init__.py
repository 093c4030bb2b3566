"""Anthropic's Messages API (/v1/messages): converts blocks to a chat request, and output to blocks.

``handlers`` is the entry point. ``request`` and ``blocks`` validate the client's request, and
``dialogue`` and ``history`` convert it to a chat request. ``output`` and ``formatter`` build the
reply and its stream from ``replies``, and ``errors`` has Anthropic's error format. The package runs
in the API process and must not import MLX, transformers, the cache or the scheduler.
"""
