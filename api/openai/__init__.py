"""Handlers of OpenAI's chat completions, completions and embeddings, and of the tokenizer routes.

Runs in the API process; must not import ``server`` or another API's handlers.
"""
