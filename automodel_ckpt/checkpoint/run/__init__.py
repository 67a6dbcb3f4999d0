"""A run's directory: who holds it, which of its checkpoints is next, which stay, what is noted beside them."""
