"""From YAML text to one tree of values, each with its line."""
