"""OpenAI's Responses API: a request's items become a conversation, what is generated becomes items.

``request`` and ``inputs`` are what a client may send, ``items`` what is kept and sent back,
``history`` leads from items to messages, ``output`` from what is generated to items and events,
and ``store`` keeps responses for a while.
"""
