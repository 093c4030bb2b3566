"""What a server must survive: each scenario does something bad to a real one and says what came."""
