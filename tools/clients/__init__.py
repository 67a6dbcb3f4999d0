"""Other programs, each in a separate environment, load what this one exports (`make clients`)."""
