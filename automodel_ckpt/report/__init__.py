"""Seeing a run: its history as read from disk, drawn as a page, a picture or a line of text. Imports no torch."""
