"""The prefix cache: a radix tree over token ids that stores one snapshot a node.

Public face: ``tree.PrefixTree`` and the ``Match`` it returns. Runs in the engine process, on the
engine's thread only. Must not import the engine or do file I/O: ``cache.store`` keeps what the tree
evicts.
"""
