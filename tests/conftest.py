"""Shared fixtures: the event loop, the default model's file, the real server."""
