"""Admits or refuses requests: API keys, rate limits, deadlines, draining, and CORS.

``admission.admission`` makes the middleware. The package runs in the API process, knows routes only
by their patterns, and must import neither handlers nor the service.
"""
