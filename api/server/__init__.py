"""The HTTP server: sockets, TLS, the aiohttp application and its routes, start and stop.

``serve.serve`` runs it, in the API process. Only the command line and
``cluster`` (for ``routes``) import this package.
"""
