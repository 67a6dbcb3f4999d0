"""Start the ranks of a run on one node or several, and report why one failed."""
