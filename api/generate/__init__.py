"""One request in the engine: its prompts and sampling parameters, its outputs, and its HTTP answer.

``Generation`` submits a request and collects its outputs; ``answer`` sends them, as one reply or as
a stream. Runs in the API process; must not import ``chat`` or any API's handlers.
"""
