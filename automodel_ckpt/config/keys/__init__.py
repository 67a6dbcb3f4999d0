"""The sections of a recipe: each key with its type, rule and description."""
