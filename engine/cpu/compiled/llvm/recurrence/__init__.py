"""Tokens of layers whose recurrent state decays: ``kernel`` has the compiled functions."""
