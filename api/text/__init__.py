"""Text: the tokenizer, and the way from output tokens to a client's text and log-probabilities.

``Vocabulary`` encodes prompts, renders chat templates and decodes. ``TextChoice`` and ``Choice``
turn the engine's outputs into pieces of text, cut at stop strings (``stops``, ``stream``), with
their ``logprobs``. ``structured`` turns the fields for structured output into one grammar. Code
that may be slow or that comes with a model runs with a time limit (``alarm``, ``limited``). The
package runs in the API process and must not import MLX, the cache or the scheduler. ``vocabulary``
and ``tokenizing`` load transformers, so most modules import them for type checking only.
"""
