"""Decides whether a request may enter: API keys, rate limits, deadlines, draining, and CORS.

``admission.admission`` is the middleware. It runs in the API process, knows routes only by their
patterns, and must import neither handlers nor the service.
"""
