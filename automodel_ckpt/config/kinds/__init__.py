"""Sections of the recipe file that only some recipes read: one module for each kind of training."""
