"""Request models (pydantic) and reply models (msgspec) that several APIs share.

The package runs in the API process and imports nothing else of ``api``.
"""
