"""Counters and intervals."""
