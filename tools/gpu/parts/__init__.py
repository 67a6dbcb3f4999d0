"""The parts of `make gpu`, one module each with a function ``run(part)``."""
