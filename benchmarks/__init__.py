"""What the library is measured by. Run modules from the repository: `python -m benchmarks.run --help`."""
