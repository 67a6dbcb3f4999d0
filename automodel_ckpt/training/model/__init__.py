"""Building a model for training, step by step."""
