"""What tensors there are, and where they stand, in whatever holds a model: described by slices, no tensor is read."""
