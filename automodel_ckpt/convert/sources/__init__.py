"""External formats: one module per format, which describes its files as slices."""
