"""Images and sound beside text."""
