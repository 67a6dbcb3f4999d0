"""Layers that are added to a model or replaced in it."""
