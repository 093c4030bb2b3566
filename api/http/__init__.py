"""HTTP basics for handlers and clients: server-sent events, and a request's route and id.

It imports nothing else of Chairlift.
"""
