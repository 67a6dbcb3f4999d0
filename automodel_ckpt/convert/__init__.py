"""Read what other programs saved, and write what they load."""
