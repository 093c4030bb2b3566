"""Decoder layers of few tokens on the CPU, from input to output.

``layer`` computes one in NumPy or by a compiled program, ``stack`` several by one call. Runs in the
engine process. Imports what ``engine.cpu`` may import.
"""
