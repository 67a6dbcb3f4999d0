"""The run directory: its lock, the choice of the checkpoint to resume from, and which checkpoints are kept."""
