"""Choosing tokens: all rows at once on the device, each row by its own parameters."""
