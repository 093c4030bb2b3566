"""Text: the tokenizer, and the way from output tokens to a client's text and log-probabilities.

``Vocabulary`` encodes prompts, renders chat templates (``template``) and decodes. ``chat_format``
holds the tags of a model's replies; ``splitter`` splits replies at them. ``Choice`` and
``TextChoice`` turn the engine's outputs into deltas of text, cut at stop strings (``stops``,
``stream``), with their ``logprobs``. ``grammars`` turns the fields for structured output into one
grammar. Code that may be slow or that comes with a model runs with a time limit (``alarm``,
``limited``).

The package runs in the API process and must not import MLX, the cache or the scheduler.
``vocabulary`` and ``tokenizing`` load transformers, and ``splitter`` loads mlx-lm, so modules that
the command line needs import these for type checking only.
"""
