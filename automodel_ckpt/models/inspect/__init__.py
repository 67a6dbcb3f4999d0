"""Facts about a model and its files."""
