"""Checkpoints in the memory of several nodes: each node has its ranks' files, and copies of other nodes' files."""
