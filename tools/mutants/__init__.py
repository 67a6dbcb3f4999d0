"""Mutation testing: change one place of the code, run the tests that reach it, count the changes that no test sees."""
