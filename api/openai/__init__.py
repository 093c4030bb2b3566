"""Handlers of OpenAI's chat completions, completions and embeddings, and of the tokenizer routes.

The package runs in the API process and must not import ``server`` or another API's handlers.
"""
