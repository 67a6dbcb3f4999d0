"""Starting and resuming a run."""
