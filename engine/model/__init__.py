"""Loads a model and calls it: weights, tokenizer, and the model calls of a step.

``loader.load_model`` reads weights of any source, ``tokenizer.load_tokenizer`` its tokenizer,
``probe.probe`` learns what a token costs, and ``forward.select_forward`` finds the cheapest correct
way to call the model. ``adapters`` make model files of mlx-lm work with rows, and ``trial`` tries
replacements before they are used. Runs in the engine process (the tokenizer in the API process and
in workers, too). Imports neither the engine's core nor its client, the scheduler or the API.
"""
