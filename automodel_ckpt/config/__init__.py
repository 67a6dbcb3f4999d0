"""Recipe files and the command line, typed and checked without torch."""
