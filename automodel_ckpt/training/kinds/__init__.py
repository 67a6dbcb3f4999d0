"""What single kinds of training need."""
