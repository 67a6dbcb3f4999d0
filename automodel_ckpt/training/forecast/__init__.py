"""Memory and disk that a run will need."""
