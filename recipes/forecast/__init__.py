"""What a run would need, found without allocating its model: steps, memory, and the size of checkpoints (--dry-run)."""
