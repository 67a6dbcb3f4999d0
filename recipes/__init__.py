"""Recipes: one class per kind of training, each readable from top to bottom."""
