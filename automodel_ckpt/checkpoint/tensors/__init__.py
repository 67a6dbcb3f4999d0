"""The values of stored tensors as numbers: an array, a box at a time, cast, compared, summed up. Imports no torch."""
