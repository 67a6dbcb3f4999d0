"""Images and sound in addition to text."""
