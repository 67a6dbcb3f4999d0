"""Write jobs: what a rank writes, as plain data, and writing it up to the finalized directory. Imports no torch."""
