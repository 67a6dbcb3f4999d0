"""A rank's share of a save as plain jobs, run in the trainer or in the writer's process."""
