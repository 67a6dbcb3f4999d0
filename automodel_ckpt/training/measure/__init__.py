"""Validation, generation and benchmarks during a run."""
