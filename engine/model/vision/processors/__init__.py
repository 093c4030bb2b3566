"""What loading and calling mlx-vlm's processors needs in a worker process besides them."""
