"""`make gpu`: measure and test training on one GPU, in parts that can be run alone and stopped at any point."""
