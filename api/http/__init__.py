"""HTTP basics for handlers and clients: server-sent events, written and parsed, and what identifies
a request. It imports nothing else of Chairlift.
"""
