"""The engine: owns MLX, turns plans into tokens one step at a time."""
