"""The images of requests: from what a request says to what an engine takes.

``loading`` gets an image's file from where its URL says, and ``vision`` lets a worker process
decode it and the model's processor prepare it. Runs in the API process; must not import MLX.
"""
