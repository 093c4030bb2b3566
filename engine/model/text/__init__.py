"""A model's tokenizer, and the text of the tokens that it generates.

It runs in the engine process; the tokenizer also in the API process and in workers. Imports neither
the API nor the engine's core.
"""
