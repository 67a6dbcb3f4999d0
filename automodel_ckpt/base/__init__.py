"""Small helpers that every package may import."""
