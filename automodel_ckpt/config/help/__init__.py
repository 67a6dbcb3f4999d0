"""What is printed about keys: help, the JSON schema, changes."""
