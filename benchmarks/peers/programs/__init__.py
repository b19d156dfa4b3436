"""One program per peer: each runs in the peer's own environment, does one job and leaves a report."""
