"""Counting operations, generating text."""
