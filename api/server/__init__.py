"""The HTTP server: sockets, TLS, the aiohttp application and its routes, start and stop.

``serve.serve`` runs it, in the API process. Nothing but the command line imports this package.
"""
