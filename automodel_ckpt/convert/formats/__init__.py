"""Files of other programs: how each kind is recognized and read."""
