"""The training loop's parts: cadence, loss, optimizer and schedule, random state, metrics, progress."""
