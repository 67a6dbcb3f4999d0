"""What recipes share: the loop, and the parts of a run."""
