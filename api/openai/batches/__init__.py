"""OpenAI's /v1/files and /v1/batches over a local folder.

A batch is a file of requests. They go through the handlers that also answer HTTP requests, in the
lowest priority class, a bounded number at a time. Each result is a row of a SQLite table before
anybody can see it, and the output file is made from that table when the batch ends; so a server
that is killed in the middle loses no result and writes none twice.

``storage.Storage`` is the folder, ``runner.BatchRunner`` does the work.
"""
