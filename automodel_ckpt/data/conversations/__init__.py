"""Chats: messages, templates, and which tokens are trained."""
