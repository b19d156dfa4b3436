"""Where the time of an epoch on Spark goes: `python -m benchmarks.breakdown --help`."""
