"""Merging adapters into their base, and averaging models."""
