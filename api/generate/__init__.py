"""Generates the reply to one request: submits its prompts to the engine, and sends the outputs.

``Generation`` submits a request and collects its outputs, and ``answer`` sends them, as one reply
or as a stream. The package runs in the API process and must not import ``chat`` or any API's
handlers.
"""
