"""Mutation testing: change one place of the code, run the tests that reach it, and count the changes nobody notices."""
