"""Watching a run: hangs, slow ranks, memory, divergence."""
