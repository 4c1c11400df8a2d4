"""What stable-baselines' users bring along: its method names, and agents that it saved."""
