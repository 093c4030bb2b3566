"""What an operator sees of requests: access log, traces, the canary, loop lag, and the page at /.

Runs in the API process. It reads a generation through ``request_record.ObservedGeneration`` and
imports neither handlers, nor ``generate``, nor the service.
"""
