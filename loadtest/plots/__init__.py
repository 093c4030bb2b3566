"""The HTML report of the load test: one self-contained page with plots as inline SVG.

``save_page`` writes it. The page opens from disk, has no scripts and loads nothing; its colours
follow the reader's light or dark mode. It runs in the client's process and must not import MLX,
the engine or the API.
"""
