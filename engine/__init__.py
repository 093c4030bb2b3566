"""The engine turns plans into tokens: it owns MLX, the scheduler and the caches.

``core`` is the machine and ``loop`` what keeps it turning; ``client`` starts it, in a process of
its own or on a thread, and streams its tokens to whoever asked. It knows nothing of HTTP.
"""
