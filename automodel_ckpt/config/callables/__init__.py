"""Which callables a recipe may name, with which arguments, and what needs trust."""
