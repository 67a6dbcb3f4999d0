"""Attention over packed documents and positions."""
