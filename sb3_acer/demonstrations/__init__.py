"""Demonstrations: recording, reading, cloning and replaying them."""
