"""LoRA adapters: rows of different adapters, and of none, are computed in the same batch.

An adapter is a product of two narrow matrices that is added to some of a model's linear layers.
Public face: ``Adapters`` (the loaded ones), ``Routing`` (the tokens that each one computes), and
``read_adapter`` (mlx-lm's and PEFT's files). Runs in the engine process.
"""
