"""What a test needs: storage that fails on demand, time and ids that stand still, and the contracts of the seams."""

from penstock.testing.clock import ManualClock, seeded_ids
from penstock.testing.contracts import StorageContract, StoreContract
from penstock.testing.faults import Crash, FaultyStorage

__all__ = [
    "Crash",
    "FaultyStorage",
    "ManualClock",
    "StorageContract",
    "StoreContract",
    "seeded_ids",
]
