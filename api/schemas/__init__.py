"""Request models (pydantic) and reply models (msgspec) that several APIs share.

Runs in the API process; imports nothing else of ``api``.
"""
