"""Saves, exports and uploads of a run."""
