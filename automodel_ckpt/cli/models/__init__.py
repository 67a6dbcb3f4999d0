"""The commands that read, write or run models."""
