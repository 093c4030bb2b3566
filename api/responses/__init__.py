"""OpenAI's Responses API (/v1/responses): converts items to a chat request, and output to items.

``handlers`` is the entry point. ``request``, ``inputs``, ``hosted``, ``parts`` and ``tools``
validate the client's request, and ``dialogue`` and ``history`` convert it to a chat request.
``output``, ``formatter`` and ``events`` build the reply and its stream. ``items`` are the stored
form of inputs and outputs, and ``store`` stores responses that clients can continue. The package
runs in the API process and must not import MLX, transformers, the cache or the scheduler.
"""
