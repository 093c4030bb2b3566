"""Observability for operators: access log, traces, canary, event loop lag, and the page at /.

It runs in the API process. It reads a generation through ``request_record.ObservedGeneration`` and
must import neither handlers, nor ``generate``, nor the service.
"""
