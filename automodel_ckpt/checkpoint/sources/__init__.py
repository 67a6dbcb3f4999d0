"""Descriptions of the tensors in a checkpoint, as slices of files. No tensor is read."""
