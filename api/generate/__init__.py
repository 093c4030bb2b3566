"""Generates the reply to one request: reads it, submits its prompts, and sends the outputs.

``read`` reads a body without blocking other streams, ``Generation`` submits a request and collects
its outputs, and ``answer`` sends them, as one reply or as a stream. The package runs in the API
process and must not import ``chat`` or any API's handlers.
"""
