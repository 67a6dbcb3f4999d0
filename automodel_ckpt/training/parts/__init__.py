"""The other parts of a run that are built before training."""
