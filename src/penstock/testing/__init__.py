"""What a test needs: storage that fails on demand, time and ids that stand still, and the contracts of the seams."""

from penstock.testing.clock import ManualClock, seeded_ids
from penstock.testing.contracts import StorageContract, StoreContract
from penstock.testing.driver import CRASH, TestDriver
from penstock.testing.faults import Crash, FaultyStorage

__all__ = [
    "CRASH",
    "Crash",
    "FaultyStorage",
    "ManualClock",
    "StorageContract",
    "StoreContract",
    "TestDriver",
    "seeded_ids",
]
