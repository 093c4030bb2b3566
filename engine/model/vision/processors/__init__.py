"""mlx-vlm's processors: how they are loaded and called, in worker processes."""
