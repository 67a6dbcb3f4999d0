"""Loss heads and their kernels."""
