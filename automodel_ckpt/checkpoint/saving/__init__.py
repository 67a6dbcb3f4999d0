"""Planning and carrying out saves, synchronous and asynchronous, and imports."""
