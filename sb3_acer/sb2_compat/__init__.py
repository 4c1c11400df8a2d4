"""Compatibility with stable-baselines: its method names, and agents that it saved."""
