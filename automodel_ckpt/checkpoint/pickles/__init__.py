"""Reading and writing files of torch without running what they name."""
