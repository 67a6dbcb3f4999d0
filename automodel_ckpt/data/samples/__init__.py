"""From rows to samples of tokens."""
