"""Penstock beside what a user would pick instead: `python -m benchmarks.peers --help`."""
