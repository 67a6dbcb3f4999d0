"""One object store: requests, their repetition, conditional writes and byte ranges."""
