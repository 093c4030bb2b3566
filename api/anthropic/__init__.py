"""Anthropic's Messages API: its blocks become a conversation, what is generated becomes blocks.

``request`` and ``blocks`` are what a client may send, ``history`` leads from them to messages,
``output`` from what is generated to blocks and events, and ``errors`` is the form of this door's
errors.
"""
