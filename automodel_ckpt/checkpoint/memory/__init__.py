"""Checkpoints in the memory of several nodes: each node has the files of its ranks, and copies of those of others."""
