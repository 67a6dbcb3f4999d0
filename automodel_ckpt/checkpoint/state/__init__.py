"""The state of a recipe's objects: read as trees of tensors and plain values, and loaded back."""
