"""Import: the files of another program become a checkpoint."""
