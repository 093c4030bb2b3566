"""A model's tokenizer, and the text of the tokens that it generates.

It runs in the engine's process, and imports neither the API nor the engine's step.
"""
