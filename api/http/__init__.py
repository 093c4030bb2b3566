"""What every handler needs of HTTP and none of the packages above owns: server-sent events, and
what identifies a request. It runs in the API process and imports nothing of Chairlift.
"""
