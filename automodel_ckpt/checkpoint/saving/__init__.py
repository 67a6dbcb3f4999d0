"""A save from its proposal to its files, for those that training waits for and those it does not; and an import."""
