"""Logs, progress, reports and trackers."""
