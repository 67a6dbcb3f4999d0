"""Commands for developing and testing this project."""
