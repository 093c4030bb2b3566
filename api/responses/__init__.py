"""OpenAI's Responses API (/v1/responses): converts items to a chat request, and output to items.

``handlers`` is the entry point. ``request``, ``inputs``, ``hosted``, ``parts`` and ``tools``
validate what a client sends; ``dialogue`` and ``history`` make a chat request of it. ``output``,
``shape`` and ``events`` build the reply and its stream. ``items`` are the stored form of inputs and
outputs, and ``store`` keeps responses that clients can continue. The package runs in the API
process and must not import MLX, transformers, the cache or the scheduler.
"""
