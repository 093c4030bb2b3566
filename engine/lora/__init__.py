"""LoRA adapters: rows of different adapters, and of none, are computed in the same batch.

An adapter is a product of two narrow matrices that is added to some of a model's linear layers.
Public face: ``Adapters``, the loaded ones. ``engine.model.lora_routing`` has the adapter of each
token of a model call. Runs in the engine process.
"""
