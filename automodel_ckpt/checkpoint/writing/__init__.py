"""What a rank has to write, as plain data, and carrying it out up to the sealed directory. Imports no torch."""
