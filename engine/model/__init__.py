"""Loads a model and calls it: weights, tokenizer, and the model calls of a step.

``loader.load_model`` loads the weights of any source, ``text.tokenizer.load_tokenizer`` its
tokenizer. ``trials.probe`` measures the memory of a token, and ``selection.select_forward`` finds
the fastest correct way to call the model. ``adapters`` make model files of mlx-lm work with rows,
and ``trials`` compares replacements with the original before they are used. Runs in the engine
process; the tokenizer also in the API process and in workers.
Imports neither the engine's core nor its client, the scheduler or the API.
"""
