"""What the objects of a recipe hold: as trees of tensors and plain values on their way out, and back into them."""
