"""Callbacks that save and resume runs of other trainers: transformers' Trainer and Lightning's. Imports neither."""
