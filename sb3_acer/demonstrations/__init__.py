"""Demonstrations: recording, reading, cloning and replaying."""
