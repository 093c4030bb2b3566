"""Attention of rows with any numbers of new tokens: ``kernel`` has the compiled functions."""
