"""The device mesh and how a model is divided over it."""
