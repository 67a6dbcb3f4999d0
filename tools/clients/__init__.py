"""Other programs, each in an environment of its own, asked to load what this one exports (`make clients`)."""
