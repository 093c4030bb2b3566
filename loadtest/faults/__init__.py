"""What may go wrong is made to go wrong, on a real server: a file a scenario, each with checks."""
