"""Samples of several texts: preferences, pairs, retrieval."""
