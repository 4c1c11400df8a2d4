"""The command line: rl-zoo's scripts, with ACER registered."""
